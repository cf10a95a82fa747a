"""Our paged attention inside transformers' modelling code, and the check that an architecture may use it.

We register two attention functions with transformers. `quire_probe` runs after loading: it records the attention call
of every layer, and `check_calls` refuses everything except plain causal attention. `quire_paged` runs while serving.
Each attention module has its LayerAttention in an attribute: only the two functions are global.

Dimensions: T tokens, H query heads, G kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.attention.layer import Attention
from quire.forward_batch import ForwardBatch
from quire.hf_config.refusal import refusal
from quire.models.transformers_layers import HeadsOfRanks

PROBE, PAGED = "quire_probe", "quire_paged"

# Arguments of attention functions that do not change the result here: positions are in q and k already, and the cache
# is ours. All other arguments must be None or False.
_HARMLESS_ARGUMENTS = frozenset(
    ("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict")
)
_NOT_CAUSAL = -1  # the probe's mask marker for everything except causal attention with or without a window
_PROBE_ATTRIBUTE, _LAYER_ATTRIBUTE = "quire_probe", "quire_attention"


@dataclass
class StepContext:
    """The batch of the running step, shared by the layers of one model."""

    batch: ForwardBatch | None = None


@dataclass(frozen=True)
class LayerAttention:
    """The function that an attention module calls while serving.

    Attributes:
        heads: the heads of each rank; None: there is one rank.
    """

    context: StepContext
    attention: Attention
    dtype: torch.dtype
    heads: HeadsOfRanks | None = None

    def __call__(self, q_1HTE: Tensor, k_1GTE: Tensor, v_1GTE: Tensor) -> Tensor:
        batch = self.context.batch
        assert batch is not None, "attention outside of forward()"
        q_THE, k_TGE, v_TGE = (x[0].transpose(0, 1) for x in (q_1HTE, k_1GTE, v_1GTE))
        if self.heads is not None:
            q_THE, k_TGE, v_TGE = self.heads.own(q_THE, k_TGE, v_TGE)
        q_THE, k_TGE, v_TGE = (x.to(self.dtype).contiguous() for x in (q_THE, k_TGE, v_TGE))
        out_THE = self.attention(q_THE, k_TGE, v_TGE, batch)
        return (out_THE if self.heads is None else self.heads.join(out_THE)).unsqueeze(0)


@dataclass
class AttentionCall:
    """One call of the attention function, recorded by the probe."""

    module: torch.nn.Module
    layer: int  # the module's own layer number; -1: it has none
    spec: AttentionSpec
    q_1HTE: Tensor
    problem: str | None


@dataclass
class Probe:
    """Collects the calls of one forward pass."""

    calls: list[AttentionCall] = field(default_factory=list)


def register() -> None:
    """Register both attention functions with transformers. A second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, _probe_attention)
    AttentionInterface.register(PAGED, _paged_attention)
    # Only the probe gets masks. transformers makes none for `quire_paged`.
    AttentionMaskInterface.register(PROBE, _mask_marker)


def attach_probe(model: torch.nn.Module, probe: Probe) -> None:
    """Let `quire_probe` record the attention calls of every module of the model."""
    for module in model.modules():
        setattr(module, _PROBE_ATTRIBUTE, probe)


def detach_probe(model: torch.nn.Module) -> None:
    """Undo `attach_probe`."""
    for module in model.modules():
        delattr(module, _PROBE_ATTRIBUTE)


def attach_layer(module: torch.nn.Module, layer: LayerAttention) -> None:
    """Let `quire_paged` call this function for an attention module."""
    setattr(module, _LAYER_ATTRIBUTE, layer)


def _paged_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **arguments: Any
) -> tuple[Tensor, None]:
    """query [1, H, T, E], key and value [1, G, T, E] -> ([1, T, H, E], no weights)."""
    return getattr(module, _LAYER_ATTRIBUTE)(query, key, value), None


def _probe_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Record the call. The result has the right shape, but its values mean nothing. The mask gives the window."""
    _, num_q_heads, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    is_marker = isinstance(attention_mask, Tensor) and attention_mask.shape == (1, 1, 1, 1)
    window = int(attention_mask) if is_marker else _NOT_CAUSAL
    extra = sorted(
        name
        for name, argument in arguments.items()
        if name not in _HARMLESS_ARGUMENTS and argument is not None and argument is not False
    )
    problem = None
    if window == _NOT_CAUSAL or is_causal is False or getattr(module, "is_causal", True) is False:
        problem = "its attention is not plain causal attention"
    elif extra:
        problem = f"its attention uses {', '.join(extra)}"
    elif getattr(module, "sinks", None) is not None:
        problem = "its attention uses sinks"
    elif value.shape != key.shape or key.shape[-1] != head_dim or num_q_heads % num_kv_heads:
        problem = f"its heads have unequal shapes (q {head_dim}, k {key.shape[-1]}, v {value.shape[-1]})"
    spec = AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scaling is None else float(scaling),
        sliding_window=max(window, 0),
        soft_cap=float(softcap or 0.0),
        dtype=value.dtype,
    )
    getattr(module, _PROBE_ATTRIBUTE).calls.append(
        AttentionCall(module, int(getattr(module, "layer_idx", -1)), spec, query, problem)
    )
    out_1HTE = value.repeat_interleave(num_q_heads // num_kv_heads, dim=1)
    return out_1HTE.transpose(1, 2).contiguous(), None


def _mask_marker(mask_function: Callable[..., Any], local_size: int | None = None, **arguments: Any) -> Tensor:
    """A tensor [1, 1, 1, 1] in place of the mask. It holds the window of the mask; 0: the mask has no window.

    It holds _NOT_CAUSAL for another kind of mask. The mask is a function of (batch, head, query position, key
    position). It is compared with ours at positions where other masks (chunked, bidirectional, prefix) differ.
    """
    window = local_size or 0
    queries = [0, 1, 2, 3 * window + 1, 1_000_003]
    offsets = [-1, 0, 1, window - 1, window, window + 1, 2 * window + 1]
    for query in queries:
        for key in {0, *(query - offset for offset in offsets)}:
            if key < 0:
                continue
            expected = key <= query and (not window or key > query - window)
            try:
                is_visible = bool(mask_function(*(torch.tensor(i) for i in (0, 0, query, key))))
            except (IndexError, RuntimeError):  # the mask is looked up in a table of this input's tokens
                return torch.full((1, 1, 1, 1), _NOT_CAUSAL)
            if is_visible != expected:
                return torch.full((1, 1, 1, 1), _NOT_CAUSAL)
    return torch.full((1, 1, 1, 1), window)


def check_calls(calls: list[AttentionCall], shifted: list[AttentionCall], architecture: str, num_layers: int) -> None:
    """Raise ModelConfigError unless every layer made one plain call, and its queries depend on the positions.

    Args:
        calls: the calls of a run at positions 0, 1, ...
        shifted: the calls of a run with the same tokens at later positions.
    """
    problem = next((call.problem for call in calls if call.problem), None)
    if problem is None and sorted(call.layer for call in calls) != list(range(num_layers)):
        problem = f"{len(calls)} attention calls for its {num_layers} layers"
    if problem is None and all(torch.equal(a.q_1HTE, b.q_1HTE) for a, b in zip(calls, shifted, strict=True)):
        problem = "its modelling code ignores the positions it is given"
    if problem:
        raise refusal(architecture, problem)
