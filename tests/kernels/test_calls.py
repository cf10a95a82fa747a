"""Calls of the extension are structs: fields have names, strides come with their tensor, and a made call never
changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import cpu, dense, ops
from quire.kernels.layer_rules import AttentionRule, HeadRotation
from quire.kernels.recording import Arena, record

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the compiled kernels")

T, H, G, E, B, P, V = 3, 4, 2, 16, 5, 4, 20


KEYS, VALUES = torch.zeros(2, B, G, P, E)
NO_ADDITIONS = torch.zeros(2, 1, 4, dtype=torch.int64)


def kv_cache() -> Any:
    return cpu._C.KvCache(k=KEYS, v=VALUES, k_scales=None, v_scales=None)


def latent_cache() -> Any:
    return cpu._C.KvCache(k=KEYS[:, :1], v=KEYS[:, :1, :, : E - 2], k_scales=None, v_scales=None)


def rotation() -> Any:
    norms = {"q_norm_weight": None, "k_norm_weight": None, "norm_eps": 0.0, "norm_weight_offset": 0.0}
    return cpu._C.HeadRotation(cos_sin=None, **norms, temperature=0.0, temperature_floor=1.0)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@cache
def packed() -> dense.PackedLinear:
    """Kept: a call keeps no tensor alive."""
    return dense.pack_linear(torch.ones(V, E))


def routing_rule() -> Any:
    return cpu._C.RoutingRule(
        **{"num_experts": 4, "num_active": 2, "scoring": 0, "num_groups": 1, "num_active_groups": 1},
        **{"group_score": 0, "normalizes": False, "scale": 1.0, "jitter": 0.0},
    )


# The fields of each struct, without optional ones.
FIELDS: dict[str, Callable[[], dict[str, Any]]] = {
    "Norm": lambda: {
        **{"x": torch.ones(T, E), "residual": None, "multiplier": 1.0, "weight": torch.ones(E), "bias": None},
        **{"eps": 1e-6, "weight_offset": 0.0, "out": torch.empty(T, E)},
    },
    "GatedActivation": lambda: {
        **{"activation": 0, "x": torch.ones(T, 2 * E), "factors": torch.ones(2), "order": ints(*[1] * T)},
        **{"begins": None, "out": torch.empty(T, E)},
    },
    "KvCache": lambda: {
        **{"k": torch.zeros(B, G, P, E), "v": torch.zeros(B, G, P, E), "k_scales": None, "v_scales": None}
    },
    "HeadRotation": lambda: {
        **{"cos_sin": torch.ones(P, E), "q_norm_weight": None, "k_norm_weight": torch.ones(E), "norm_eps": 1e-6},
        **{"norm_weight_offset": 0.0, "temperature": 0.0, "temperature_floor": 1.0},
    },
    "RopeAndCache": lambda: {
        **{"q": torch.ones(T, H, E), "k": torch.ones(T, G, E), "v": torch.ones(T, G, E)},
        **{"positions": torch.arange(T), "slot_mapping": torch.arange(T), "cache": kv_cache(), "rotation": rotation()},
    },
    "AttentionRule": lambda: {"scale": 0.5, "sliding_window": 0, "soft_cap": 0.0, "chunk": 0},
    "PagedAttention": lambda: {
        **{"q": torch.ones(1, H, E), "cache": kv_cache(), "block_tables": ints(0, 1)[None], "seq_lens": ints(2)},
        **{"cu_seqlens_q": ints(0, 1), "sinks": torch.ones(H), "out": torch.empty(1, H, E)},
        "rule": cpu._C.AttentionRule(scale=0.5, sliding_window=0, soft_cap=0.0, chunk=0),
    },
    "GroupedForm": lambda: {"bits": 4, "group_size": 32, "scales": 1, "offsets": 0, "super_size": 1},
    "PackedWeight": lambda: {"data": torch.zeros(64 * E), "n": V, "k": E},
    "Gemm": lambda: {"x": torch.ones(T, E), "weight": packed().panels, "bias": None, "out": torch.empty(T, V)},
    "WeightRows": lambda: {"weight": packed().panels, "rows": torch.arange(T), "out": torch.empty(T, E)},
    "LoraTable": lambda: {"deltas": NO_ADDITIONS, "dtype": 0, "k": E, "columns": [V]},
    "AddLora": lambda: {
        **{"table": cpu._C.LoraTable(deltas=NO_ADDITIONS, dtype=0, k=E, columns=[V]), "x": torch.ones(T, E)},
        **{"token_ids": None, "slots": ints(-1, 0, 1), "base": torch.ones(T, V), "out": torch.empty(T, V)},
    },
    "RoutingRule": lambda: {
        **{"num_experts": 4, "num_active": 2, "scoring": 0, "num_groups": 1, "num_active_groups": 1},
        **{"group_score": 0, "normalizes": False, "scale": 1.0, "jitter": 0.0},
    },
    "Route": lambda: {
        **{"logits": torch.ones(T, 4), "rule": routing_rule(), "bias": None, "experts": ints(*range(6)).view(T, 2)},
        **{"weights": torch.empty(T, 2), "order": ints(*range(6)), "begins": ints(*range(5)), "places": None},
    },
    "ExpertStack": lambda: {"first": packed().panels, "num_experts": 1},
    "ExpertProduct": lambda: {
        **{"x": torch.ones(T, E), "stack": cpu._C.ExpertStack(first=packed().panels, num_experts=1), "bias": None},
        **{"order": ints(*range(T)), "begins": ints(0, T), "num_slots": 1, "of_tokens": True},
        **{"first_place": 0, "out": torch.empty(T, V)},
    },
    "CombineExperts": lambda: {
        **{"y": torch.ones(2 * T, E), "order": ints(*range(2 * T)), "weights": torch.ones(T, 2), "shared": None},
        **{"shared_gate": None, "out": torch.empty(T, E)},
    },
    "HeadGemm": lambda: {"x": torch.ones(T, 1, E), "weight": packed().panels, "out": torch.empty(T, 1, V)},
    "LatentRopeAndCache": lambda: {
        **{"q": torch.ones(T, 1, 2), "rows": torch.ones(T, E), "positions": torch.arange(T)},
        **{
            "slot_mapping": torch.arange(T),
            "cache": latent_cache(),
            "cos_sin": torch.ones(T, 2),
            "is_interleaved": False,
        },
        "out": torch.empty(T, 1, 2),
    },
    "Greedy": lambda: {"logits": torch.ones(T, V), "token_ids": torch.empty(T, dtype=torch.int64)},
    "Sample": lambda: {
        **{"logits": torch.ones(T, V), "temperature": torch.ones(T), "top_k": ints(0, 0, 0), "top_p": torch.ones(T)},
        **{"min_p": torch.zeros(T), "uniform": torch.zeros(T).double(), "token_ids": torch.empty(T).long()},
    },
    "ForbidTokens": lambda: {"logits": torch.ones(T, V), "masks": ints(-1, 0)[:, None], "rows": ints(0, 2)},
    "Logprobs": lambda: {
        **{"logits": torch.ones(T, V), "token_ids": torch.arange(T), "token_logprobs": torch.empty(T)},
        **{"ranks": torch.empty(T).long(), "top_ids": torch.empty(T, 1).long(), "top_logprobs": torch.empty(T, 1)},
    },
}


def structs() -> set[str]:
    """The structs that kernels are called by, without the text indexes of drafters and the memory of ranks."""
    others = {
        "CorrectedSteps",
        "KernelCall",
        "NgramIndex",
        "SuffixIndex",
        "SharedTexts",
        "SharedGroup",
        "GroupError",
        "RankLate",
        "Whereabouts",
        "StepVoid",
        "Gather",
        "Exchange",
        "SharedAttention",
    }
    return {name for name, member in vars(cpu._C).items() if isinstance(member, type)} - others


def test_every_struct_is_here() -> None:
    assert FIELDS.keys() == structs()


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_given_by_name_and_all_of_them(name: str) -> None:
    struct, fields = getattr(cpu._C, name), FIELDS[name]()
    made = struct(**fields)
    if isinstance(made, cpu._C.KernelCall):
        made.run()
    with pytest.raises(TypeError, match="incompatible function arguments"):
        struct(*fields.values())
    for field in fields:
        with pytest.raises(TypeError) as missing:
            struct(**{key: value for key, value in fields.items() if key != field})
        wanted, given = str(missing.value).split("Invoked with types")
        assert f" {field}: " in wanted
        assert f" {field}: " not in given
        with pytest.raises(TypeError, match=" other: int"):
            struct(**fields, other=1)
        with pytest.raises(AttributeError):
            setattr(made, field, fields[field])
    for field in [key for key, value in fields.items() if isinstance(value, Tensor)]:
        with pytest.raises(TypeError, match=f" {field}: int"):
            struct(**fields | {field: fields[field].data_ptr()})


def test_no_function_takes_a_position() -> None:
    """But those whose one argument is named by the function."""
    for name, member in vars(cpu._C).items():
        if not name.startswith("_") and callable(member) and not isinstance(member, type):
            signature = str(member.__doc__).splitlines()[0]
            taken = signature[signature.index("(") + 1 : signature.rindex(")")].split(", ")
            assert len(taken) <= 2 or taken[0] == "*", signature


def test_a_tensor_of_a_dtype_that_no_kernel_has_is_refused() -> None:
    fields = FIELDS["Norm"]()
    for wrong in (torch.float64, torch.int16, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="expected float32, bfloat16 or float16"):
            cpu._C.Norm(**fields | {"x": torch.ones(T, E).to(wrong)})
    with pytest.raises(ValueError, match="1 dimensions, expected 2"):
        cpu._C.Norm(**fields | {"x": torch.ones(E)})


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("GatedActivation", "activation", 4, "activation is 4, expected 0 to 3"),
        ("GroupedForm", "scales", 6, "scales is 6, expected 0 to 5"),
        ("GroupedForm", "offsets", -1, "offsets is -1, expected 0 to 5"),
        ("RoutingRule", "scoring", -1, "scoring is -1, expected 0 to 3"),
        ("RoutingRule", "group_score", 2, "group_score is 2, expected 0 to 1"),
        ("LoraTable", "dtype", 3, "dtype is 3, expected 0 to 2"),
        ("LoraTable", "columns", [V, V], "deltas have 64 bytes, expected 32 for each of 2 slots and 2 parts"),
    ],
)
def test_numbers_that_no_kernel_knows_are_refused(name: str, field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(cpu._C, name)(**FIELDS[name]() | {field: value})


@pytest.mark.parametrize("dtype", [-1, 3])
def test_bytes_of_a_dtype_that_no_kernel_knows_are_refused(dtype: int) -> None:
    with pytest.raises(ValueError, match=f"dtype is {dtype}, expected 0 to 2"):
        cpu._C.gemm_packed_bytes(dtype=dtype, n=V, k=E)


def test_strides_are_those_of_the_tensor() -> None:
    """The same numbers in any layout, every stride different from the others."""
    x, residual = torch.randn(T, E), torch.randn(T, E)
    expected = ops.add_rms_norm(x, residual.clone(), torch.ones(E), 1e-6)
    wide = [torch.zeros(T, E + more) for more in (3, 5, 9)]
    views = [part[:, 1 : E + 1] for part in wide]
    views[0].copy_(x)
    views[1].copy_(residual)
    ops.add_rms_norm(views[0], views[1], torch.ones(E), 1e-6, out=views[2])
    assert torch.equal(views[2], expected)
    assert torch.equal(views[1], x + residual)


def test_a_recorded_call_has_copies_of_what_it_was_made_of() -> None:
    """Structs that were shared, and views that are gone, do not change it; numbers in its tensors are read anew."""
    x, weight, out = torch.randn(T, E), torch.randn(V, E), torch.empty(T, V)
    own = dense.pack_linear(weight)

    def run() -> Tensor:
        panels = cpu.packed_weight(own.data, V, E)
        cpu.gemm(x.view(T, E), panels, None, out.view(T, V))
        return out

    _, calls = record(run, Arena())
    assert calls is not None
    cpu.packed_weight(torch.zeros(64 * E), 1, 1)  # where the freed struct was, perhaps
    x.mul_(2)
    out.zero_()
    for call in calls:
        call()
    assert torch.equal(out, dense.linear(x, own))


def test_what_a_layer_keeps_is_made_once_and_cannot_be_changed() -> None:
    cache, rule, rotation = LayerCache(KEYS, VALUES), AttentionRule(0.5), HeadRotation(torch.ones(P, E))
    made = []
    for _ in range(2):
        q_THE, k_TGE = torch.ones(1, H, E), torch.ones(1, G, E)
        ops.rope_and_cache(q_THE, k_TGE, k_TGE, torch.arange(1), torch.arange(1), cache, rotation)
        ops.paged_attention(q_THE, cache, ints(0)[None], ints(1), ints(0, 1), rule)
        made.append((cache.compiled, rule.compiled, rotation.compiled))
    assert all(first is second for first, second in zip(*made, strict=True))
    assert replace(cache, k_BGPE=VALUES).compiled is None
    for kept, field in ((cache, "k_BGPE"), (rule, "scale"), (rotation, "cos_sin_PR")):
        with pytest.raises(FrozenInstanceError):
            setattr(kept, field, None)
