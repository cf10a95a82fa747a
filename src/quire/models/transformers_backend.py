"""Runs architectures without native implementation: transformers' code with our paged attention and linear layers.

The tokens of a step go through the code as one row [1, T, D] with their positions; only attention sees sequences.
Our reader reads the weights. transformers places them (`from_pretrained` with a state dict), because it knows the names
of each class in every version. Only config.json and the validated safetensors of a checkpoint are opened, and no code
in it is run.

Dimensions: T tokens, R rows with logits, D hidden, K in-features, N out-features, V vocabulary.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire import logs
from quire.attention.backend import AttentionSpec
from quire.attention.divided import DividedAttention
from quire.attention.layer import Attention
from quire.attention.select import SharedBackends
from quire.errors import ConfigError, ModelConfigError
from quire.formats.kv_groups import kv_groups, table_of_layer
from quire.forward_batch import ForwardBatch, HostStep, LayerCache
from quire.hf_config.json_file import read_object
from quire.hf_config.refusal import refusal
from quire.hf_config.translate import merge
from quire.kernels.pages import copied
from quire.layers.weight_slot import Extent, ExtentOf
from quire.model_config import ModelConfig
from quire.models import transformers_attention as attention
from quire.models.form import ALONE, Sharing
from quire.models.transformers_layers import (
    CodeRanks,
    CutEmbedding,
    HeadsOfRanks,
    KernelLinear,
    extents,
    replace_layers,
)
from quire.models.weights import check_fit, without_kv_scales
from quire.resolve import shown_bytes

# Settings in config.json that would make transformers load other code, other kernels or other files.
_IGNORED_SETTINGS = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "fusion_config",
    "transformers_weights",
    "custom_generate",
)
# Rotary frequencies of these kinds depend on the longest sequence of a batch. So one request would change the tokens of
# another one.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}  # the values in layer_types
_MOST_NAMES = 3  # in a log line
_PROBE_SHIFT = 5  # the second probe begins at this position, the first at 0
# transformers changes settings of the process while it makes a model, and ranks may be threads of one process.
_loading = threading.Lock()

logger = logs.get_logger(__name__)


class TransformersModel:
    """A causal language model of transformers. It implements CausalLM, like the native models.

    Args:
        config: gives the sizes of the KV cache. Everything else is read from config.json, with the same overrides.
        dtype: the dtype of weights, activations and KV cache.
        device: the model runs there.
        attention_backend: the name of the backend; see attention.select.
        sharing: the ranks with which the model is shared.

    Raises:
        ModelConfigError: transformers does not know the architecture, or it cannot run on paged attention.
        ConfigError: transformers is not installed.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        attention_backend: str = "auto",
        sharing: Sharing = ALONE,
    ) -> None:
        self.config, self._num_kv_owners = config, sharing.num_kv_owners
        self._ranks = None if sharing.group is None else CodeRanks(sharing.group)
        self.device = device
        self.mapped_bytes = 0
        self.dtype = dtype
        self._model_class, self._hf_config = _classes(config)
        self._hf_config.dtype = dtype
        attention.register()
        groups = kv_groups(config)
        self._windows = {layer: group.spec.window for group in groups for layer in group.layers}
        self._backends = SharedBackends(table_of_layer(groups), device, attention_backend)
        self._context = attention.StepContext()
        self._model: Any = None  # has weights after load_weights
        self._body: Any = None  # everything from the embeddings to the final norm

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters and saved buffers by name; tied tensors appear once."""
        tensors = self._without_values().state_dict(keep_vars=True)
        by_tensor = {id(tensor): (name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return dict(by_tensor.values())

    def extent(self, checkpoint_name: str) -> Extent | None:
        """The part of a tensor that this rank reads; None: it reads all of the tensor."""
        return None if self._extents is None else self._extents(checkpoint_name)

    @cached_property
    def _extents(self) -> ExtentOf | None:
        return None if self._ranks is None else extents(self._without_values(), self._ranks)

    def _without_values(self) -> Any:
        """A new model with tied weights, on torch's device `meta`."""
        with _loading, torch.device("meta"):
            model = self._model_class(self._hf_config)
            model.tie_weights()
        return model

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the tensors of a checkpoint. They may have the names of any version of transformers.

        Raises:
            WeightsError: tensors are missing or unexpected, or have another shape. The message names them.
        """
        self._hf_config._attn_implementation = attention.PROBE
        given = dict(without_kv_scales(weights))
        with _loading, _quiet_transformers():
            model, report = self._model_class.from_pretrained(
                None,
                config=self._hf_config,
                state_dict=given,
                dtype=self.dtype,
                attn_implementation=attention.PROBE,
                ignore_mismatched_sizes=True,  # the report lists them all
                output_loading_info=True,
                trust_remote_code=False,
            )
        _check_report(report)
        self._model = model.eval().requires_grad_(False)

    @torch.inference_mode()
    def finalize(self) -> None:
        """Pack the linear layers, probe the attention of every layer, and connect it to the KV cache.

        Raises:
            ModelConfigError: the modelling code cannot run on paged attention.
        """
        replace_layers(self._model, self.device, self._ranks)
        self._model.to(self.device)
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            tensor.data = copied(tensor.data)  # a tensor that was not packed is still a view of the mapped file
        self._body = self._split_off_head()
        calls = self._probe(0)
        attention.check_calls(calls, self._probe(_PROBE_SHIFT), self.config.architecture, self.config.num_layers)
        for call in calls:
            attention.attach_layer(call.module, self._layer_attention(call))
        _set_attention(self._body, attention.PAGED)
        self._log_what_is_whole()

    def weight_bytes(self) -> int:
        """Bytes of the loaded weights. Weights that several layers share count once."""
        parameters: dict[int, int] = {}
        packed = 0
        for part in (self._body, self._model):
            parameters |= {parameter.data_ptr(): parameter.nbytes for parameter in part.parameters()}
            packed += sum(module.packed.nbytes for module in part.modules() if isinstance(module, KernelLinear))
        return sum(parameters.values()) + packed

    def _log_what_is_whole(self) -> None:
        """Say which weights all ranks hold."""
        if self._ranks is None or self._ranks.rank != 0:
            return
        num_cut, whole = 0, Counter[str]()
        for module in {id(module): module for part in (self._body, self._model) for module in part.modules()}.values():
            if isinstance(module, CutEmbedding) or (isinstance(module, KernelLinear) and module.is_cut):
                num_cut += 1
                continue
            whole[type(module).__name__] += sum(each.nbytes for each in module.parameters(recurse=False))
            whole[type(module).__name__] += module.packed.nbytes if isinstance(module, KernelLinear) else 0
        named = ", ".join(f"{name} {shown_bytes(count)}" for name, count in whole.most_common(_MOST_NAMES) if count)
        total = shown_bytes(whole.total())
        logger.info("ranks share %d layers; each rank holds %s that is not shared: %s", num_cut, total, named)

    def prepare(self, step: HostStep, caches: list[LayerCache]) -> None:
        """Do the host's work for a step."""
        self._backends.prepare(step, caches)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute hidden_TD after the final norm, in `dtype`. Keys and values of the tokens go to `batch.caches`."""
        if batch.host is not None:
            self.prepare(batch.host, batch.caches)
        self._context.batch = batch
        try:
            return self._run_body(batch.token_ids_T, batch.positions_T)
        finally:
            self._context.batch = None

    def compute_logits(
        self, hidden_RD: Tensor, adapter_slots_R: Tensor | None = None, owners_R: Tensor | None = None
    ) -> Tensor:
        """Compute logits_RV in float32. The model class's own head applies its scale and its cap.

        A head may compute with all logits of a row. So all ranks get them, and each keeps its rows.
        """
        assert adapter_slots_R is None, "adapters are for native models"
        logits_1RV: Tensor = self._model(inputs_embeds=hidden_RD[None], use_cache=False).logits
        logits_RV = logits_1RV[0]
        if self._ranks is None:
            return logits_RV.float()
        if owners_R is not None:
            return logits_RV[owners_R == self._ranks.rank].float()
        return (logits_RV if self._ranks.rank == 0 else logits_RV[:, :0]).float()

    def _run_body(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        output = self._body(input_ids=token_ids_T[None], position_ids=positions_T[None], use_cache=False)
        hidden_1TD: Tensor = output.last_hidden_state
        return hidden_1TD[0]

    def _split_off_head(self) -> Any:
        """Take the part below the head out of the model. A module that passes hidden states on takes its place."""
        model = self._model
        body = getattr(model, model.base_model_prefix, None)
        if body is None:
            raise refusal(self.config.architecture, "its modelling code does not separate body and head")
        if [name for name, _ in body.named_children()] == ["decoder"]:  # OPT: the head calls model.decoder
            body = body.decoder
        if "position_ids" not in inspect.signature(body.forward).parameters:
            raise refusal(self.config.architecture, "its modelling code takes no positions")
        setattr(model, model.base_model_prefix, _HiddenStates())
        return body

    def _probe(self, first_position: int) -> list[attention.AttentionCall]:
        """The attention call of every layer, from a run on three tokens."""
        probe = attention.Probe()
        attention.attach_probe(self._body, probe)
        positions_T = torch.arange(3, device=self.device)
        try:
            with nullcontext() if self._ranks is None else self._ranks.alone():  # others may still read weights
                self._run_body(positions_T % self.config.vocab_size, positions_T + first_position)
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            raise refusal(self.config.architecture, f"its modelling code fails ({error})") from error
        finally:
            attention.detach_probe(self._body)
        return probe.calls

    def _layer_attention(self, call: attention.AttentionCall) -> attention.LayerAttention:
        """The attention of a layer, with the heads of this rank."""
        spec, heads, divided = call.spec, None, None
        if self._ranks is not None:
            heads = HeadsOfRanks(self._ranks, spec.num_q_heads, spec.num_kv_heads)
            if not all(heads.counts):
                raise refusal(self.config.architecture, f"layer {call.layer} has {spec.num_q_heads} heads, too few")
            spec = replace(spec, num_q_heads=len(heads.own_q), num_kv_heads=len(heads.own_kv))
            if self._num_kv_owners > 1:
                divided = DividedAttention(spec, self._ranks.group, heads.counts, self._num_kv_owners)
        self._check_cache_shape(call, spec)
        paged = Attention(call.layer, divided or self._backends.get(call.layer, spec), cos_sin_LR=None)
        return attention.LayerAttention(self._context, paged, self.dtype, heads)

    def _check_cache_shape(self, call: attention.AttentionCall, own: AttentionSpec) -> None:
        config = self.config
        actual = own.num_kv_heads, own.head_dim
        spec = config.kv_specs()[call.layer]
        if actual != (spec.num_kv_heads, spec.head_dim_k):
            raise refusal(
                config.architecture,
                f"layer {call.layer} stores {actual[0]} heads of {actual[1]} per token, but config.json describes "
                f"{spec.num_kv_heads} of {spec.head_dim_k}",
            )
        window = self._windows[call.layer]
        if window and call.spec.sliding_window != window:
            raise refusal(
                config.architecture,
                f"layer {call.layer} sees {call.spec.sliding_window or 'all'} tokens, and config.json says {window}",
            )


class _BodyOutput:
    """A body's output for heads: the hidden states. All other attributes are None."""

    def __init__(self, hidden_1RD: Tensor) -> None:
        self.last_hidden_state = hidden_1RD

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _HiddenStates(nn.Module):
    """Takes the place of a model's body. It returns the embeddings that it gets, as if they were hidden states."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)

    @property
    def decoder(self) -> _HiddenStates:
        return self


def _classes(config: ModelConfig) -> tuple[Any, Any]:
    """The model class that config.json names, and its config object.

    Raises ConfigError if transformers is not installed, and ModelConfigError if the architecture cannot run here.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{config.architecture} has no native implementation and transformers is not installed",
            fix="pip install transformers",
        ) from error
    logs.adopt("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    path = Path(config.model) / "config.json"
    settings = merge(read_object(path, required=True), config.hf_overrides)
    if config.architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or config.model_type not in CONFIG_MAPPING:
        if settings.get("text_config"):
            raise ModelConfigError(
                f"{config.architecture} (model_type {config.model_type}) reads more than text, "
                "but models in Quire read only text",
                fix="Take a checkpoint of its text part alone, or another model",
            )
        raise ModelConfigError(
            f"{path} names an architecture that Quire and transformers {transformers.__version__} do not know "
            "as a causal language model",
            value=f"{config.architecture} (model_type {config.model_type})",
            fix="Code in a checkpoint is never run. A newer transformers may know it: pip install -U transformers",
        )
    try:
        hf_config = CONFIG_MAPPING[config.model_type].from_dict(
            {name: value for name, value in settings.items() if name not in _IGNORED_SETTINGS}
        )
    except Exception as error:  # many libraries have their own kinds of validation errors
        raise ModelConfigError(
            f"transformers refuses {path}: {error}", fix="Use the checkpoint's own config.json"
        ) from error
    _check_activation(hf_config, path)
    model_class = getattr(transformers, config.architecture)
    if _keeps_state(model_class, hf_config) or getattr(hf_config, "is_encoder_decoder", False):
        raise refusal(config.architecture, "it keeps other state than keys and values")
    if not model_class._can_set_attn_implementation():
        raise refusal(config.architecture, "its modelling code does not use the attention interface")
    rope = getattr(hf_config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            raise refusal(config.architecture, f"its {parameters['rope_type']} rope depends on the whole batch")
    if getattr(hf_config, "output_router_logits", False):  # only a training loss needs them
        hf_config.output_router_logits = False
    return model_class, hf_config


def _keeps_state(model_class: Any, hf_config: Any) -> bool:
    """Whether layers keep more than keys and values.

    A config of a hybrid architecture may have attention layers only (Granite 4).
    """
    layer_types = getattr(hf_config, "layer_types", None)
    return bool(model_class._is_stateful and not (layer_types and _ATTENTION_LAYERS.issuperset(layer_types)))


def _check_activation(hf_config: Any, path: Path) -> None:
    """Raise ModelConfigError for an unknown activation. Modelling code would fail without a useful message."""
    from transformers.activations import ACT2FN

    for field in ("hidden_activation", "hidden_act"):
        name = getattr(hf_config, field, None)
        if isinstance(name, str) and name not in ACT2FN:
            raise ModelConfigError(
                f"{path} has a {field} that Quire and transformers do not know",
                value=name,
                expected="one of " + ", ".join(ACT2FN),
                fix="Use the config.json that belongs to the checkpoint",
            )


def _check_report(report: dict[str, Any]) -> None:
    """Raise WeightsError for tensors that transformers could not place."""
    kinds = ("missing", "unexpected", "mismatched")
    names = {kind: sorted(str(name) for name in report[f"{kind}_keys"]) for kind in kinds}
    check_fit(names, [str(message) for message in report.get("error_msgs", [])])


def _set_attention(body: Any, name: str) -> None:
    """Set the attention function in every config object of the model, because modelling code reads several."""
    for module in body.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
            module.config._attn_implementation_internal = name
        if isinstance(getattr(module, "_attn_implementation", None), str):
            module._attn_implementation = name


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and load reports, because ours say the same. Its errors still appear."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
