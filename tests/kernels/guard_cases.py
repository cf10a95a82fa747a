"""Calls of every op with one wrong argument each, and the error that they have to raise: the table of test_guards.py.

    python -m tests.kernels.guard_cases START PATH...   # runs the cases from this one on, and prints a line for each

The paths are `kernels` and `reference`. The first cases are for the first path.

Without a guard many of them end the interpreter, or read foreign memory. Dimensions as in kernels/ops.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from quire.kernels import cpu, dense, experts, fp8, grouped, ops
from quire.kernels.expert_stack import PackedStack, StackBuilder
from quire.kernels.fp8_weight import Fp8Weight
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.lora import LoraTable, RowAdapters, add_lora
from quire.kernels.recording import Arena, record
from quire.kernels.routing import Routing, RoutingRule
from tests.kernels import by_name
from tests.kernels.deltas import pack_delta

HUGE = 1 << 62


@dataclass(frozen=True)
class Case:
    """`error` None: the call is right. `says`: is in the message. Only on the compiled kernels: plain torch has no need
    to ask for it."""

    name: str
    call: Callable[[], Any]
    error: type[Exception] | None = None
    says: str = ""
    needs_kernels: bool = False


Arguments = Callable[[], dict[str, Any]]


class Table:
    """Cases of one function: its right arguments, and one wrong argument after the other."""

    def __init__(self, name: str, function: Callable[..., Any], arguments: Arguments) -> None:
        self._name, self._function, self._arguments = name, function, arguments
        self.cases = [Case(f"{name}: right", lambda: function(**arguments()))]

    def add(self, error: type[Exception], says: str, what: str, *, needs_kernels: bool = False, **wrong: Any) -> None:
        """`wrong`: other arguments; a function makes one of the right one."""

        def call() -> Any:
            right = self._arguments()
            return self._function(**right | {k: v(right[k]) if callable(v) else v for k, v in wrong.items()})

        self.cases.append(Case(f"{self._name}: {what}", call, error, says, needs_kernels))

    def add_elsewhere(self, *names: str) -> None:
        """Tensors without memory, whose address is 0."""
        for name in names:
            self.add(ValueError, "meta", f"{name} without memory", **{name: lambda x: x.to("meta")})

    def add_dtypes(self, **wrong: torch.dtype) -> None:
        for name, dtype in wrong.items():
            self.add(TypeError, f"is {dtype}", f"{name} of another dtype", **{name: partial(_as, dtype=dtype)})


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _set(*index: int, to: float) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        x[index] = to
        return x

    return changed


def _columns(x: Tensor) -> Tensor:
    """The same shape and numbers, but the last dimension is not contiguous."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x.repeat_interleave(2)[::2]


def norms() -> Iterator[Case]:
    plain = Table("rms_norm", ops.rms_norm, lambda: {"x_TD": torch.ones(3, 8), "weight_D": torch.ones(8), "eps": 1e-6})
    plain.add(ValueError, "x is [3, 0]", "no columns", x_TD=torch.ones(3, 0), weight_D=torch.ones(0))
    plain.add(ValueError, "x is [8]", "one dimension", x_TD=torch.ones(8))
    plain.add(ValueError, "x has strides", "rows that are columns", x_TD=_columns)
    plain.add(ValueError, "weight is [7], expected [8]", "weight too short", weight_D=torch.ones(7))
    plain.add(ValueError, "weight has strides", "weight with gaps", weight_D=_columns)
    plain.add(ValueError, "out is [2, 8], expected [3, 8]", "out too short", out=torch.empty(2, 8))
    plain.add(ValueError, "out has strides", "out of columns", out=_columns(torch.empty(3, 8)))
    plain.add(ValueError, "out is on meta", "out without memory", out=torch.empty(3, 8, device="meta"))
    plain.add(TypeError, "out is torch.float64", "out of another dtype", out=torch.empty(3, 8).double())
    plain.add_elsewhere("x_TD", "weight_D")
    plain.add_dtypes(weight_D=torch.bfloat16)
    yield from plain.cases
    added = Table(
        "add_rms_norm",
        ops.add_rms_norm,
        lambda: {"x_TD": torch.ones(3, 8), "residual_TD": torch.ones(3, 8), "weight_D": torch.ones(8), "eps": 1e-6},
    )
    added.add(ValueError, "residual is [2, 8], expected [3, 8]", "residual too short", residual_TD=torch.ones(2, 8))
    added.add(ValueError, "residual has strides", "residual of columns", residual_TD=_columns)
    added.add_elsewhere("x_TD", "residual_TD", "weight_D")
    added.add_dtypes(residual_TD=torch.bfloat16)
    yield from added.cases
    layer = Table(
        "layer_norm",
        ops.layer_norm,
        lambda: {"x_TD": torch.ones(3, 8), "weight_D": torch.ones(8), "bias_D": torch.ones(8), "eps": 1e-6},
    )
    layer.add(ValueError, "bias is [7], expected [8]", "bias too short", bias_D=torch.ones(7))
    layer.add(ValueError, "bias has strides", "bias with gaps", bias_D=_columns)
    layer.add_elsewhere("x_TD", "weight_D", "bias_D")
    layer.add_dtypes(bias_D=torch.bfloat16)
    yield from layer.cases


def activations() -> Iterator[Case]:
    table = Table("gated_activation", ops.gated_activation, lambda: {"name": "silu", "x_T2I": torch.ones(3, 8)})
    table.add(ValueError, "the activation is 'relu'", "unknown name", name="relu")
    table.add(ValueError, "x is [3, 0]", "no columns", x_T2I=torch.ones(3, 0))
    table.add(ValueError, "x is [3, 7]", "an odd number of columns", x_T2I=torch.ones(3, 7))
    table.add(ValueError, "x is [8]", "one dimension", x_T2I=torch.ones(8))
    table.add(ValueError, "x has strides", "rows that are columns", x_T2I=_columns, needs_kernels=True)
    table.add(ValueError, "out is [3, 3], expected [3, 4]", "out too short", out=torch.empty(3, 3))
    table.add(ValueError, "out is on meta", "out without memory", out=torch.empty(3, 4, device="meta"))
    table.add(TypeError, "out is torch.float64", "out of another dtype", out=torch.empty(3, 4).double())
    factors = {"factors_F": torch.ones(2), "order_T": torch.tensor([1, 0, 1], dtype=torch.int32)}
    table.add(ValueError, "factors without an order", "factors without an order", factors_F=factors["factors_F"])
    short = factors | {"order_T": factors["order_T"][:2]}
    table.add(ValueError, "order is [2], expected [3]", "an order that is too short", **short)
    wide = factors | {"order_T": factors["order_T"].long()}
    table.add(TypeError, "order is torch.int64", "an order of another dtype", **wide)
    table.add(
        IndexError,
        "order[1] is -1",
        "an order before the factors",
        **factors | {"order_T": _set(1, to=-1)(factors["order_T"])},
    )
    table.add_elsewhere("x_T2I")
    yield from table.cases


T, H, G, E, B, P, L = 3, 4, 2, 8, 5, 4, 10
rope_and_cache = partial(by_name.rope_and_cache, ops.rope_and_cache)
paged_attention = partial(by_name.paged_attention, ops.paged_attention)


def rope_arguments() -> dict[str, Any]:
    return {
        "q_THE": torch.ones(T, H, E),
        "k_TGE": torch.ones(T, G, E),
        "v_TGE": torch.ones(T, G, E),
        "positions_T": torch.tensor([0, 1, L - 1]),
        "cos_sin_PR": torch.ones(L, 6),
        "slot_mapping_T": torch.tensor([-1, 0, B * P - 1]),
        "k_cache_BGPE": torch.zeros(B, G, P, E),
        "v_cache_BGPE": torch.zeros(B, G, P, E),
        "q_norm_weight_E": torch.ones(E),
        "k_norm_weight_E": torch.ones(E),
        "norm_eps": 1e-6,
    }


def attention_arguments() -> dict[str, Any]:
    return {
        "q_THE": torch.ones(T, H, E),
        "k_cache_BGPE": torch.zeros(B, G, P, E),
        "v_cache_BGPE": torch.zeros(B, G, P, E),
        "block_tables_SM": torch.tensor([[0, 4, 2, -9], [1, 1 << 30, 9, 9]], dtype=torch.int32),
        "seq_lens_S": torch.tensor([3 * P, 2], dtype=torch.int32),
        "cu_seqlens_q_S1": torch.tensor([0, 1, 3], dtype=torch.int32),
        "scale": 0.3,
    }


def caches(table: Table) -> None:
    """The common checks of rope_and_cache and paged_attention on q and the caches."""
    empty = {name: torch.zeros(B, G, 0, E) for name in ("k_cache_BGPE", "v_cache_BGPE")}
    codes = {name: torch.zeros(B, G, P, E, dtype=torch.int8) for name in empty}
    scales = {name: torch.ones(B, G, P) for name in ("k_scales_BGP", "v_scales_BGP")}
    table.add(ValueError, "k_cache is [5, 2, 0, 8]", "blocks of no slot", **empty)
    table.add(ValueError, "q is [3, 8]", "q of two dimensions", q_THE=torch.ones(T, E))
    table.add(ValueError, "q is [3, 4, 0]", "heads of no dimension", q_THE=torch.ones(T, H, 0))
    table.add(ValueError, "q is [3, 0, 8]", "no query head", q_THE=torch.ones(T, 0, E))
    table.add(ValueError, "k_cache is [5, 0, 4, 8]", "no KV head", k_cache_BGPE=torch.zeros(B, 0, P, E))
    table.add(ValueError, "k_cache is [5, 2, 4, 7]", "keys of another head_dim", k_cache_BGPE=torch.zeros(B, G, P, 7))
    table.add(ValueError, "v_cache is [4, 2, 4, 8]", "fewer blocks of values", v_cache_BGPE=torch.zeros(B - 1, G, P, E))
    table.add(ValueError, "v_cache has strides", "blocks with gaps", v_cache_BGPE=_columns)
    table.add(ValueError, "k_scales is missing", "codes without scales", **codes)
    table.add(ValueError, "k_scales is given", "scales without codes", **scales)
    short = scales | {"v_scales_BGP": torch.ones(B, G, P - 1)}
    table.add(ValueError, "v_scales is [5, 2, 3], expected [5, 2, 4]", "scales too short", **codes, **short)
    wide = scales | {"v_scales_BGP": _columns(torch.ones(B, G, P))}
    table.add(ValueError, "v_scales has strides", "scales with gaps", **codes, **wide)
    double = scales | {"k_scales_BGP": torch.ones(B, G, P).double()}
    table.add(TypeError, "k_scales is torch.float64", "scales of another dtype", **codes, **double)
    table.add_dtypes(k_cache_BGPE=torch.bfloat16, v_cache_BGPE=torch.float8_e5m2)
    table.add_elsewhere("q_THE", "k_cache_BGPE", "v_cache_BGPE")


def rope() -> Iterator[Case]:
    table = Table("rope_and_cache", rope_and_cache, rope_arguments)
    caches(table)
    for position in (L, -1, HUGE, -HUGE):
        table.add(IndexError, f"positions[1] is {position}", f"position {position}", positions_T=_set(1, to=position))
    for slot in (B * P, HUGE):
        table.add(IndexError, f"slot_mapping[2] is {slot}", f"slot {slot}", slot_mapping_T=_set(2, to=slot))
    none = {name: torch.zeros(0, G, P, E) for name in ("k_cache_BGPE", "v_cache_BGPE")}
    table.add(IndexError, "slot_mapping[1] is 0", "a cache of no block", **none)
    table.add(ValueError, "cos_sin is [0, 6]", "no position", cos_sin_PR=torch.ones(0, 6))
    table.add(ValueError, "k is [2, 2, 8], expected [3, 2, 8]", "fewer keys", k_TGE=torch.ones(T - 1, G, E))
    table.add(ValueError, "v is [3, 1, 8], expected [3, 2, 8]", "fewer heads of values", v_TGE=torch.ones(T, 1, E))
    table.add(ValueError, "positions is [2], expected [3]", "fewer positions", positions_T=torch.tensor([0, 1]))
    table.add(ValueError, "slot_mapping is [2], expected [3]", "fewer slots", slot_mapping_T=torch.tensor([0, 1]))
    table.add(ValueError, "cos_sin is [60]", "cos_sin of one dimension", cos_sin_PR=torch.ones(60))
    table.add(ValueError, "cos_sin is [10, 5]", "an odd rotary_dim", cos_sin_PR=torch.ones(L, 5))
    table.add(ValueError, "cos_sin is [10, 10]", "rotary_dim above head_dim", cos_sin_PR=torch.ones(L, E + 2))
    table.add(ValueError, "cos_sin has strides", "cos_sin with gaps", cos_sin_PR=_columns)
    table.add(ValueError, "q_norm_weight is [7], expected [8]", "norm too short", q_norm_weight_E=torch.ones(7))
    for name in ("q_THE", "k_TGE", "v_TGE", "positions_T", "slot_mapping_T", "k_norm_weight_E"):
        table.add(ValueError, "has strides", f"{name} with gaps", **{name: _columns}, needs_kernels=True)
    table.add_elsewhere("k_TGE", "v_TGE", "positions_T", "cos_sin_PR", "slot_mapping_T", "q_norm_weight_E")
    table.add_dtypes(k_TGE=torch.bfloat16, v_TGE=torch.float64, positions_T=torch.int32, slot_mapping_T=torch.int32)
    table.add_dtypes(cos_sin_PR=torch.float64, q_norm_weight_E=torch.bfloat16, k_norm_weight_E=torch.int64)
    half = {name: torch.ones(*shape).half() for name, shape in {"q_THE": (T, H, E), "k_TGE": (T, G, E)}.items()}
    half |= {"v_TGE": half["k_TGE"], "q_norm_weight_E": torch.ones(E).half()}
    half |= {name: torch.zeros(B, G, P, E).half() for name in ("k_cache_BGPE", "v_cache_BGPE")}
    table.add(TypeError, "k_norm_weight is torch.float32", "norm weights that differ in dtype", **half)
    yield from table.cases


def attention() -> Iterator[Case]:
    table = Table("paged_attention", paged_attention, attention_arguments)
    caches(table)
    for block in (B, -1, -5, (1 << 31) - 1, -(1 << 31)):
        wrong = _set(0, 1, to=block)
        table.add(IndexError, f"block_tables[0, 1] is {block}, ", f"block {block}", block_tables_SM=wrong)
    table.add(IndexError, "block_tables[1, 0] is 5, ", "the last block in use", block_tables_SM=_set(1, 0, to=B))
    none = {name: torch.zeros(0, G, P, E) for name in ("k_cache_BGPE", "v_cache_BGPE")}
    table.add(IndexError, "block_tables[0, 0] is 0, ", "a cache of no block", **none)
    for length in (4 * P + 1, 1, 0, -1, 1 << 24, (1 << 31) - 1):
        table.add(ValueError, f"seq_lens[1] is {length}, ", f"length {length}", seq_lens_S=_set(1, to=length))
    table.add(ValueError, "seq_lens[0] is 12, ", "a table of two blocks", block_tables_SM=lambda x: x[:, :2])
    table.add(ValueError, "seq_lens[0] is 12, ", "a table of no block", block_tables_SM=lambda x: x[:, :0])
    table.add(ValueError, "cu_seqlens_q[0] is -1, ", "sums that begin below 0", cu_seqlens_q_S1=_set(0, to=-1))
    table.add(ValueError, "cu_seqlens_q", "sums that fall", cu_seqlens_q_S1=_set(0, to=2))
    for end in (T + 1, (1 << 31) - 1):
        table.add(ValueError, f"cu_seqlens_q[2] is {end}, ", f"sums that end at {end}", cu_seqlens_q_S1=_set(2, to=end))
    table.add(ValueError, "q has 3 heads", "heads that do not divide", q_THE=torch.ones(T, 3, E))
    table.add(ValueError, "seq_lens is [2, 1]", "lengths in two dimensions", seq_lens_S=lambda x: x[:, None])
    table.add(ValueError, "cu_seqlens_q is [2], expected [3]", "a sum missing", cu_seqlens_q_S1=lambda x: x[:2])
    table.add(ValueError, "block_tables is [1, 4]", "a table missing", block_tables_SM=lambda x: x[:1])
    table.add(ValueError, "block_tables is [8]", "tables of one dimension", block_tables_SM=lambda x: x.flatten())
    for name, number in (
        ("scale", 0.0),
        ("scale", math.nan),
        ("sliding_window", -1),
        ("soft_cap", -0.5),
        ("chunk", -1),
    ):
        table.add(ValueError, f"{name} {number}", f"{name} {number}", **{name: number})
    table.add(ValueError, "chunk 4, sliding_window 4", "a window and chunks", chunk=4, sliding_window=4)
    table.add(ValueError, "sinks is [3], expected [4]", "a sink missing", sinks_H=torch.ones(H - 1))
    table.add(TypeError, "sinks is torch.float64", "sinks of another dtype", sinks_H=torch.ones(H).double())
    table.add(ValueError, "out is [3, 4, 7], expected [3, 4, 8]", "out too short", out_THE=torch.empty(T, H, 7))
    table.add(TypeError, "out is torch.float64", "out of another dtype", out_THE=torch.empty(T, H, E).double())
    table.add(ValueError, "out is on meta", "out without memory", out_THE=torch.empty(T, H, E, device="meta"))
    for name in ("q_THE", "block_tables_SM", "seq_lens_S", "cu_seqlens_q_S1"):
        table.add(ValueError, "has strides", f"{name} with gaps", **{name: _columns}, needs_kernels=True)
    table.add_elsewhere("block_tables_SM", "seq_lens_S", "cu_seqlens_q_S1")
    table.add_dtypes(block_tables_SM=torch.int64, seq_lens_S=torch.int64, cu_seqlens_q_S1=torch.int64)
    yield from table.cases


def sampling() -> Iterator[Case]:
    R, V = 3, 20

    def logits() -> dict[str, Any]:
        return {"logits_RV": torch.arange(R * V).view(R, V) / 7}

    def parameters() -> dict[str, Any]:
        return {
            "temperature_R": torch.tensor([0.0, 0.5, 1.0]),
            "top_k_R": torch.tensor([0, 5, V + 9], dtype=torch.int32),
            "top_p_R": torch.tensor([0.0, 0.5, 1.0]),
            "min_p_R": torch.tensor([0.0, 0.5, 1.0]),
            "uniform_R": torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64),
        }

    def ids() -> dict[str, Any]:
        return {"token_ids_R": torch.tensor([0, 1, V - 1]), "num_top": 2}

    def masks() -> dict[str, Any]:
        rows = torch.tensor([0, R - 1], dtype=torch.int32)
        return {"masks_MW": torch.tensor([[-1], [5]], dtype=torch.int32), "rows_M": rows}

    greedy = Table("greedy", ops.greedy, logits)
    forbid = Table("forbid_tokens", ops.forbid_tokens, lambda: logits() | masks())
    sample = Table("sample", ops.sample, lambda: logits() | parameters())
    logprobs = Table("logprobs", ops.logprobs, lambda: logits() | ids())
    for table in (greedy, sample, logprobs, forbid):
        table.add(ValueError, "logits is [20]", "logits of one dimension", logits_RV=torch.ones(V))
        table.add(ValueError, "logits is [3, 0]", "no vocabulary", logits_RV=torch.ones(R, 0))
        table.add(ValueError, "logits has strides", "logits in columns", logits_RV=_columns)
        table.add_dtypes(logits_RV=torch.bfloat16)
        table.add_elsewhere("logits_RV")
    wrong: dict[str, tuple[float, ...]] = {
        "temperature": (-1.0, -1e-6, math.nan, math.inf),
        "top_k": (-1, -(1 << 31)),
        "top_p": (-0.5, 1.5, math.nan),
        "min_p": (-0.5, 1.5, math.nan),
        "uniform": (-0.25, 1.0, 7.0, math.nan, math.inf),
    }
    for name, numbers in wrong.items():
        for number in numbers:
            says = f"{name}[1] is {number if name == 'top_k' else ''}"
            sample.add(ValueError, says, f"{name} {number}", **{f"{name}_R": _set(1, to=number)})
        sample.add(ValueError, f"{name} is [2], expected [3]", f"fewer of {name}", **{f"{name}_R": lambda x: x[:2]})
        sample.add(ValueError, f"{name} has strides", f"{name} with gaps", **{f"{name}_R": _columns})
        sample.add_elsewhere(f"{name}_R")
        sample.add_dtypes(**{f"{name}_R": torch.int64})
    sample.add(ValueError, "logits are [3, 524288]", "too large a vocabulary", logits_RV=torch.ones(R, 1 << 19))
    for token_id in (V, -1, HUGE, -HUGE):
        says = f"token_ids[2] is {token_id}, "
        logprobs.add(IndexError, says, f"token id {token_id}", token_ids_R=_set(2, to=token_id))
    for num_top in (-1, V + 1):
        logprobs.add(ValueError, f"num_top is {num_top}", f"{num_top} highest", num_top=num_top)
    logprobs.add(ValueError, "token_ids is [2], expected [3]", "fewer ids", token_ids_R=torch.tensor([0, 1]))
    logprobs.add_dtypes(token_ids_R=torch.int32)
    logprobs.add_elsewhere("token_ids_R")
    for row in (R, -1):
        forbid.add(IndexError, f"rows[1] is {row}, ", f"row {row}", rows_M=_set(1, to=row))
    forbid.add(ValueError, "masks is [1, 1], expected [2, 1]", "fewer masks", masks_MW=lambda x: x[:1])
    forbid.add(ValueError, "masks is [2, 2], expected [2, 1]", "wider masks", masks_MW=lambda x: x.repeat(1, 2))
    forbid.add(ValueError, "rows is [1, 2], expected [1]", "rows of two dimensions", rows_M=lambda x: x[None])
    forbid.add(ValueError, "masks has strides", "masks with gaps", masks_MW=lambda x: x.repeat(2, 1)[::2])
    forbid.add(ValueError, "rows has strides", "rows with gaps", rows_M=_columns)
    forbid.add_dtypes(masks_MW=torch.int64, rows_M=torch.int64)
    forbid.add_elsewhere("masks_MW", "rows_M")
    yield from forbid.cases
    yield from greedy.cases
    yield from sample.cases
    yield from logprobs.cases


N, K = 70, 64


def products() -> Iterator[Case]:
    """With weights of each kind: what goes into a product, and which rows are looked up."""
    weight_NK = torch.ones(N, K)
    packed: dict[str, tuple[Any, Callable[..., Tensor], Callable[..., Tensor]]] = {
        "dense": (dense.pack_linear(weight_NK), dense.linear, dense.packed_rows),
        "fp8": (fp8.pack_fp8(fp8.quantize_fp8(weight_NK)), fp8.fp8_linear, fp8.fp8_rows),
        "grouped": (
            grouped.pack_grouped(grouped.quantize_grouped(weight_NK, 4, 32)),
            grouped.grouped_linear,
            grouped.grouped_rows,
        ),
    }
    for kind, (weight, linear, rows) in packed.items():
        given = {"packed": weight, "bias_N": None, "out": None, "out_dtype": None}
        table = Table(f"{kind} product", linear, lambda given=given: {"x_TK": torch.ones(3, K)} | given)
        table.add(ValueError, "x is [3, 63], expected [T, 64]", "x too short", x_TK=torch.ones(3, K - 1))
        table.add(ValueError, "x is [64]", "x of one dimension", x_TK=torch.ones(K))
        table.add(ValueError, "bias is [69], expected [70]", "bias too short", bias_N=torch.ones(N - 1))
        table.add(ValueError, "bias is on meta", "bias without memory", bias_N=torch.ones(N, device="meta"))
        table.add(TypeError, "bias is torch.int64", "bias of whole numbers", bias_N=torch.ones(N).long())
        table.add(ValueError, "out is [2, 70], expected [3, 70]", "out too short", out=torch.empty(2, N))
        table.add(ValueError, "out has strides", "out of columns", out=_columns(torch.empty(3, N)))
        table.add(ValueError, "out is on meta", "out without memory", out=torch.empty(3, N, device="meta"))
        table.add(TypeError, "is torch.int8", "out of another dtype", out=torch.empty(3, N).char())
        table.add(TypeError, "is torch.float64", "a result of another dtype", out_dtype=torch.float64)
        slots = torch.tensor([-1, 0, 1], dtype=torch.int32)
        narrow, embedding = product_table(columns=N - 1), product_table(looks_up=True)
        for error, says, what, of_table, of_slots in (
            (ValueError, "the adapters' table is of [69, 64], expected [70, 64]", "a table too narrow", narrow, slots),
            (ValueError, "table is of an embedding", "a table of an embedding", embedding, slots),
            (ValueError, "slots is [2], expected [3]", "slots too short", product_table(), slots[:2]),
            (TypeError, "slots is torch.int64", "slots of another dtype", product_table(), slots.long()),
            (ValueError, "slots is on meta", "slots without memory", product_table(), slots.to("meta")),
            (IndexError, "slots[2] is 2, expected -1 or more", "no such slot", product_table(), slots.add(slots == 1)),
            (IndexError, "slots[0] is -2", "a slot below -1", product_table(), slots - 1),
        ):
            table.add(error, says, what, adapters=RowAdapters(of_table, of_slots))
        table.add_elsewhere("x_TK")
        table.add_dtypes(x_TK=torch.float64)
        yield from table.cases
        dtype = {} if kind == "dense" else {"dtype": torch.bfloat16}
        lookup = Table(
            f"{kind} rows",
            rows,
            lambda weight=weight, dtype=dtype: {"packed": weight, "rows_T": torch.tensor([0, 5, N - 1])} | dtype,
        )
        for row in (N, N + 57, -1, HUGE, -HUGE):
            lookup.add(IndexError, f"rows[1] is {row}, ", f"row {row}", rows_T=_set(1, to=row))
        lookup.add(ValueError, "rows is [1, 3]", "rows in two dimensions", rows_T=lambda x: x[None])
        lookup.add_dtypes(rows_T=torch.int32)
        lookup.add_elsewhere("rows_T")
        if dtype:
            lookup.add(TypeError, "is torch.int8", "rows of another dtype", dtype=torch.int8)
        yield from lookup.cases
    codes = fp8.Fp8Rows(torch.ones(3, K).to(torch.float8_e4m3fn), torch.ones(3, 1), torch.float32)
    yield Case(
        "fp8 product: rows of codes",
        lambda: fp8.fp8_linear(codes, packed["fp8"][0]),
        TypeError,
        "x are Fp8Rows",
        needs_kernels=True,
    )
    norm = Table(
        "rms_norm_to_fp8",
        fp8.rms_norm_to_fp8,
        lambda: (
            {"x_TD": torch.ones(3, 8), "residual_TD": None, "multiplier": 1.0, "weight_D": torch.ones(8)}
            | {"eps": 1e-6, "weight_offset": 0.0}
        ),
    )
    norm.add(ValueError, "weight is [7], expected [8]", "weight too short", weight_D=torch.ones(7))
    norm.add(ValueError, "residual is [2, 8]", "residual too short", residual_TD=torch.ones(2, 8))
    yield from norm.cases[1:]  # there is no GPU for the right ones
    gated = Table(
        "gated_activation_to_fp8", fp8.gated_activation_to_fp8, lambda: {"name": "silu", "x_T2I": torch.ones(3, 8)}
    )
    gated.add(ValueError, "x is [3, 7]", "an odd number of columns", x_T2I=torch.ones(3, 7))
    gated.add(ValueError, "x has strides", "rows that are columns", x_T2I=_columns)
    yield from gated.cases[1:]


def _bands(*bands: Any) -> dict[str, Any]:
    return {"bands": list(bands)}


def weights() -> Iterator[Case]:
    """What is quantized and packed."""
    for name, function, more in (
        ("pack_linear", dense.pack_linear, {}),
        ("quantize_fp8", fp8.quantize_fp8, {}),
        ("quantize_grouped", grouped.quantize_grouped, {"bits": 8, "group_size": 32}),
    ):
        table = Table(name, function, lambda more=more: {"weight_NK": torch.ones(N, K)} | more)
        for shape in ((K,), (N, 0), (0, K), (1, N, K)):
            table.add(ValueError, f"weight is {list(shape)}", f"a weight {list(shape)}", weight_NK=torch.ones(shape))
        table.add_dtypes(weight_NK=torch.float64)
        table.add_elsewhere("weight_NK")
        if more:
            for bits in (0, -1, 1, 5, 9):
                table.add(ValueError, f"bits are {bits}", f"{bits} bits", bits=bits)
            for size in (0, -32, 17, 1 << 17):
                table.add(ValueError, f"group_size is {size}", f"groups of {size}", group_size=size)
        yield from table.cases

    codes = Table(
        "Fp8Weight",
        lambda **parts: fp8.pack_fp8(Fp8Weight(**parts)),
        lambda: {"codes_NK": torch.ones(N, K).to(torch.float8_e4m3fn), "scales_NG": torch.ones(N, 2), "group_size": 32},
    )
    for size in (0, -32, 33):
        codes.add(ValueError, f"group_size is {size}", f"groups of {size}", group_size=size)
    codes.add(ValueError, "scales is [70, 1], expected [70, 2]", "scales too short", scales_NG=torch.ones(N, 1))
    codes.add(ValueError, "codes is [64]", "codes of one dimension", codes_NK=lambda x: x[0])
    codes.add(ValueError, "codes is [70, 0]", "no columns", codes_NK=lambda x: x[:, :0])
    codes.add_dtypes(codes_NK=torch.uint8, scales_NG=torch.float64)
    codes.add_elsewhere("codes_NK", "scales_NG")
    yield from codes.cases

    integers = Table(
        "GroupedWeight",
        lambda **parts: grouped.pack_grouped(GroupedWeight(**parts)),
        lambda: {
            "codes_NK": torch.ones(N, K, dtype=torch.uint8),
            "bits": 4,
            "group_size": 32,
            "scales_NG": torch.ones(N, 2),
            "zeros_NG": torch.ones(N, 2, dtype=torch.uint8),
            "order_K": torch.arange(K).flip(0),
        },
    )
    for bits in (0, 1, 7, 9):
        integers.add(ValueError, f"bits are {bits}", f"{bits} bits", bits=bits)
    for size in (0, -32, 17):
        integers.add(ValueError, f"group_size is {size}", f"groups of {size}", group_size=size)
    integers.add(ValueError, "group_size is 48", "groups of 48 codes of 3 bits", group_size=48, bits=3)
    for index in (K, -1, HUGE, 5):  # 5 is there already
        integers.add(ValueError, "expected each of 0 to 63 once", f"order with {index}", order_K=_set(0, to=index))
    integers.add(ValueError, "order_K is [63], expected [64]", "order too short", order_K=lambda x: x[1:])
    integers.add(ValueError, "scales_NG is [70, 1], expected [70, 2]", "scales too short", scales_NG=torch.ones(N, 1))
    integers.add(ValueError, "zeros_NG is [69, 2], expected [70, 2]", "zeros too short", zeros_NG=lambda x: x[1:])
    integers.add(ValueError, "codes_NK is [64]", "codes of one dimension", codes_NK=lambda x: x[0])
    integers.add(ValueError, "super_size is 0", "super-groups of none", super_size=0)
    integers.add(ValueError, "super_size is 2", "super-groups without numbers", super_size=2)
    integers.add(ValueError, "int8 factors", "factors without numbers", scales_NG=lambda x: x.char())
    integers.add(ValueError, "expected one of them", "zeros and minima", minima_NG=torch.ones(N, 2))
    integers.add_dtypes(codes_NK=torch.int8, scales_NG=torch.float64, zeros_NG=torch.int8, order_K=torch.int32)
    integers.add_elsewhere("codes_NK", "scales_NG", "zeros_NG", "order_K")
    yield from integers.cases

    wide = torch.ones(64, K)
    of_8 = partial(grouped.quantize_grouped, bits=8, group_size=32)
    kinds: tuple[tuple[str, Callable[..., Any], Callable[[Tensor], Any], Any], ...] = (
        ("pack_linear_bands", dense.pack_linear_bands, lambda x: x, wide.bfloat16()),
        ("pack_fp8_bands", fp8.pack_fp8_bands, fp8.quantize_fp8, None),
        ("pack_grouped_bands", grouped.pack_grouped_bands, of_8, grouped.quantize_grouped(wide, 4, 32)),
    )
    for name, function, made, other in kinds:
        bands = Table(name, function, lambda made=made: _bands(made(wide), made(wide[:6])) | {"N": 70})
        too_many = _bands(made(wide), made(wide), made(wide))
        bands.add(ValueError, "bytes or more", "more rows than said", **too_many, needs_kernels=True)
        bands.add(ValueError, "the bands take", "fewer rows than said", **_bands(made(wide)), needs_kernels=True)
        narrow = _bands(made(wide), made(torch.ones(6, K + 32)))
        bands.add(ValueError, "a band", "a band of more columns", **narrow, needs_kernels=True)
        if other is not None:
            error = TypeError if isinstance(other, Tensor) else ValueError
            mixed = _bands(made(wide), other)
            bands.add(error, "a band is", "a band of another format", **mixed, needs_kernels=True)
        yield from (Case(c.name, c.call, c.error, c.says, True) for c in bands.cases)


@cache
def product_table(columns: int = N, looks_up: bool = False) -> LoraTable:
    """For a weight [columns, K]. Kept: a call keeps no tensor alive."""
    table = LoraTable(2, 4, K, (columns,), torch.float32, torch.device("cpu"), looks_up=looks_up)
    table.set(1, [pack_delta(torch.ones(2, K), torch.ones(columns, 2), 1.0, looks_up=looks_up)])
    return table


@cache
def product_weight() -> dense.PackedLinear:
    """[N, K]. Kept: a call keeps no tensor alive."""
    return dense.pack_linear(torch.ones(N, K))


def product_with_adapters(x_TK: Tensor, slots_T: Tensor) -> Tensor:
    return dense.linear(x_TK, product_weight(), adapters=RowAdapters(product_table(), slots_T))


def product_with_adapters_arguments() -> dict[str, Any]:
    product_weight()  # not first in a recording, whose memory ends with it
    assert product_table().compiled is not None
    return {"x_TK": torch.ones(3, K), "slots_T": torch.tensor([-1, 0, 1], dtype=torch.int32)}


@cache
def adapter_table(looks_up: bool = False) -> LoraTable:
    """Kept: a call keeps no tensor alive."""
    table = LoraTable(2, 4, 8, (5, 3), torch.float32, torch.device("cpu"), looks_up=looks_up)
    table.set(1, [pack_delta(torch.ones(2, 8), torch.ones(5, 2), 1.0, looks_up=looks_up), None])
    return table


def addition_arguments() -> dict[str, Any]:
    return {
        "base_TN": torch.ones(3, 8),
        "x": torch.ones(3, 8),
        "slots_T": torch.tensor([-1, 0, 1], dtype=torch.int32),
        "table": adapter_table(),
        "out_dtype": torch.float32,
        "out": torch.empty(3, 8),
    }


def additions() -> Iterator[Case]:
    table = Table("add_lora", add_lora, addition_arguments)
    table.add(ValueError, "base is [3, 7], expected [3, 8]", "base too narrow", base_TN=torch.ones(3, 7))
    table.add(ValueError, "base is [8], expected [T, 8]", "base of one dimension", base_TN=torch.ones(8))
    table.add(ValueError, "base has strides", "base of columns", base_TN=_columns)
    table.add(ValueError, "x is [3, 9], expected [3, 8]", "x too wide", x=torch.ones(3, 9))
    table.add(ValueError, "x has strides", "rows that are columns", x=_columns)
    table.add(ValueError, "slots is [2], expected [3]", "slots too short", slots_T=torch.zeros(2, dtype=torch.int32))
    table.add(ValueError, "slots has strides", "slots with gaps", slots_T=_columns)
    table.add(IndexError, "slots[1] is 2, expected -1 or more, and less than 2", "no such slot", slots_T=_set(1, to=2))
    table.add(IndexError, "slots[0] is -2", "a slot below -1", slots_T=_set(0, to=-2))
    table.add(ValueError, "out is [3, 7], expected [3, 8]", "out too narrow", out=torch.empty(3, 7))
    table.add(ValueError, "out has strides", "out of columns", out=_columns(torch.empty(3, 8)))
    table.add(TypeError, "the result's dtype is torch.float64", "a result of another dtype", out_dtype=torch.float64)
    table.add_elsewhere("base_TN", "x", "slots_T")
    table.add_dtypes(base_TN=torch.bfloat16, x=torch.float64, slots_T=torch.int64, out=torch.bfloat16)
    yield from table.cases
    looked_up = Table(
        "add_lora of embeddings",
        add_lora,
        lambda: addition_arguments() | {"x": torch.tensor([0, 7, 3]), "table": adapter_table(looks_up=True)},
    )
    looked_up.add(
        IndexError, "token_ids[1] is 8, expected 0 or more, and less than 8", "no such token", x=_set(1, to=8)
    )
    looked_up.add(ValueError, "token_ids is [2], expected [3]", "too few tokens", x=torch.zeros(2, dtype=torch.int64))
    looked_up.add_dtypes(x=torch.int32)
    yield from looked_up.cases
    held = Table("LoraTable.set", lambda deltas: adapter_table().set(0, deltas), lambda: {"deltas": [None, None]})
    wide, narrow = (
        pack_delta(torch.ones(2, 9), torch.ones(5, 2), 1.0),
        pack_delta(torch.ones(2, 8), torch.ones(4, 2), 1.0),
    )
    half = pack_delta(torch.ones(2, 8).half(), torch.ones(5, 2).half(), 1.0)
    held.add(ValueError, "a delta has 9 in-features, expected 8", "more in-features", deltas=[wide, None])
    held.add(ValueError, "a delta has 4 out-features, expected 5 of part 0", "too narrow", deltas=[narrow, None])
    high = pack_delta(torch.ones(5, 8), torch.ones(5, 5), 1.0)
    held.add(ValueError, "a delta has rank 5, expected 4 at most", "a rank too high", deltas=[high, None])
    held.add(TypeError, "a delta is torch.float16", "another dtype", deltas=[half, None])
    held.add(ValueError, "zip() argument", "a part too few", deltas=[None])
    yield from held.cases


@cache
def expert_stack() -> PackedStack:
    """Two experts [70, 64]. Kept: a call keeps no tensor alive."""
    builder = StackBuilder(2, N)
    for e in range(2):
        builder.put(e, dense.pack_linear(torch.ones(N, K), builder.memory(e)))
    return builder.finished()


def routing() -> dict[str, Any]:
    """Three tokens with two slots of two experts."""
    return {
        "experts_TS": torch.tensor([[0, 1]] * 3, dtype=torch.int32),
        "weights_TS": torch.ones(3, 2),
        "order_P": torch.tensor([0, 2, 4, 1, 3, 5], dtype=torch.int32),
        "begins": torch.tensor([0, 3, 6], dtype=torch.int32),
    }


def expert_product(*, experts_TS: Tensor, weights_TS: Tensor, order_P: Tensor, begins: Tensor, **others: Any) -> Tensor:
    given = Routing(experts_TS, weights_TS, order_P, begins)
    return experts.expert_linear(stack=expert_stack(), routing=given, of_tokens=True, **others)


def combination(*, experts_TS: Tensor, weights_TS: Tensor, order_P: Tensor, begins: Tensor, **others: Any) -> Tensor:
    return experts.combine(routing=Routing(experts_TS, weights_TS, order_P, begins), **others)


def product_of_experts() -> dict[str, Any]:
    return {"x": torch.ones(3, K), "bias_EN": torch.ones(2, N)} | routing()


def mixtures() -> Iterator[Case]:
    """Mixture of experts."""
    rule = Table("RoutingRule", RoutingRule, lambda: {"num_experts": 8, "num_active": 2})
    rule.add(ValueError, "the scoring is 'relu'", "unknown scoring", scoring="relu")
    rule.add(ValueError, "the group_score is 'sum'", "unknown score", group_score="sum")
    rule.add(ValueError, "9 experts are active, expected 1 to the 8", "more than all", num_active=9)
    rule.add(ValueError, "0 experts are active", "none active", num_active=0)
    rule.add(ValueError, "8 experts in 3 groups", "uneven groups", num_groups=3)
    rule.add(ValueError, "8 experts in 0 groups", "no groups", num_groups=0)
    rule.add(ValueError, "3 of 2 groups are active", "too many groups", num_groups=2, num_active_groups=3)
    rule.add(ValueError, "the 2 of the active groups", "more than the groups have", num_groups=4, num_active=3)
    rule.add(ValueError, "groups of 1 expert", "two best of one", num_groups=8, num_active_groups=2, group_score="top2")
    rule.add(ValueError, "sparsemixer", "groups of sparsemixer", scoring="sparsemixer", num_groups=2)
    rule.add(ValueError, "the jitter is -1", "jitter below 0", jitter=-1.0)
    yield from rule.cases
    choice = Table(
        "route",
        experts.route,
        lambda: {"logits_TE": torch.ones(3, 8), "rule": RoutingRule(8, 2), "bias_E": torch.ones(8)},
    )
    choice.add(ValueError, "logits is [3, 7], expected [T, 8]", "logits too narrow", logits_TE=torch.ones(3, 7))
    choice.add(ValueError, "logits is [8]", "logits of one dimension", logits_TE=torch.ones(8))
    choice.add(ValueError, "logits has strides", "logits of columns", logits_TE=_columns)
    choice.add(ValueError, "bias is [7], expected [8]", "bias too short", bias_E=torch.ones(7))
    choice.add(ValueError, "bias has strides", "bias with gaps", bias_E=_columns)
    choice.add(ValueError, "a bias with the scoring sparsemixer", "no such bias", rule=RoutingRule(8, 2, "sparsemixer"))
    choice.add_elsewhere("logits_TE", "bias_E")
    choice.add_dtypes(logits_TE=torch.bfloat16, bias_E=torch.bfloat16)
    yield from choice.cases
    product = Table("expert_linear", expert_product, product_of_experts)
    product.add(ValueError, "x is [2, 64], expected [3, 64]", "too few rows", x=torch.ones(2, K))
    product.add(ValueError, "x is [3, 63], expected [3, 64]", "x too short", x=torch.ones(3, K - 1))
    product.add(ValueError, "x has strides", "rows that are columns", x=_columns)
    product.add(ValueError, "bias is [1, 70], expected [2, 70]", "bias of one expert", bias_EN=torch.ones(1, N))
    product.add(ValueError, "bias has strides", "bias of columns", bias_EN=_columns)
    product.add(TypeError, "is torch.float64", "a result of another dtype", out_dtype=torch.float64)
    product.add(ValueError, "out is [5, 70], expected [6, 70]", "out too short", out=torch.empty(5, N))
    product.add(ValueError, "out has strides", "out of columns", out=_columns(torch.empty(6, N)))
    product.add(TypeError, "is torch.int8", "out of another dtype", out=torch.empty(6, N).char())
    combined = Table(
        "combine", combination, lambda: {"y_PD": torch.ones(6, 5), "shared_TD": torch.ones(3, 5)} | routing()
    )
    combined.add(ValueError, "y is [5, 5], expected [6, D]", "too few rows", y_PD=torch.ones(5, 5))
    combined.add(ValueError, "y is [6, 0]", "no columns", y_PD=torch.ones(6, 0), shared_TD=None)
    combined.add(ValueError, "y has strides", "rows that are columns", y_PD=_columns)
    combined.add(ValueError, "shared is [3, 4], expected [3, 5]", "shared too narrow", shared_TD=torch.ones(3, 4))
    combined.add(ValueError, "shared has strides", "shared of columns", shared_TD=_columns)
    combined.add(ValueError, "shared_gate is [3], expected [3, 1]", "a flat gate", shared_gate_T1=torch.ones(3))
    combined.add(TypeError, "is torch.bfloat16", "gate of another dtype", shared_gate_T1=torch.ones(3, 1).bfloat16())
    combined.add(
        ValueError, "shared_gate without shared", "only a gate", shared_TD=None, shared_gate_T1=torch.ones(3, 1)
    )
    combined.add_elsewhere("y_PD", "shared_TD")
    combined.add_dtypes(y_PD=torch.float64, shared_TD=torch.bfloat16)
    for table in (product, combined):
        for number in (6, -1, 1 << 30):
            table.add(
                IndexError,
                f"[2] is {number}, expected 0 or more, and less than 6",
                f"pair {number}",
                order_P=_set(2, to=number),
            )
        table.add(ValueError, "order is [5], expected [6]", "too few pairs", order_P=lambda x: x[1:])
        table.add(ValueError, "experts is [6]", "experts of one dimension", experts_TS=lambda x: x.flatten())
        table.add(ValueError, "weights is [3, 1], expected [3, 2]", "weights too narrow", weights_TS=torch.ones(3, 1))
        table.add(ValueError, "order has strides", "pairs with gaps", order_P=_columns)
        table.add_elsewhere("order_P", "weights_TS")
        table.add_dtypes(order_P=torch.int64, weights_TS=torch.bfloat16, begins=torch.int64)
    product.add(ValueError, "begins is [2], expected [3]", "begins too short", begins=lambda x: x[1:])
    for index, number, error, says in (
        (1, 7, IndexError, "begins[1] is 7, expected 0 or more, and less than 7"),
        (1, -1, IndexError, "begins[1] is -1"),
        (0, 1, ValueError, "begins go from 1 to 6"),
        (2, 5, ValueError, "begins go from 0 to 5"),
        (0, 4, ValueError, "begins[1] is 3, expected 4 or more"),
    ):
        product.add(error, says, f"begins[{index}] {number}", begins=_set(index, to=number))
    product.add_elsewhere("x", "bias_EN")
    product.add_dtypes(x=torch.bfloat16, bias_EN=torch.int64)
    yield from product.cases
    yield from combined.cases


def threads() -> Iterator[Case]:
    for number in (0, -1, 1 << 20, (1 << 31) - 1):
        yield Case(
            f"set_num_threads: {number}",
            lambda number=number: cpu.set_num_threads(number),
            ValueError,
            "number of kernel threads",
            needs_kernels=number > 0,
        )


def recorded() -> Iterator[Case]:
    """Recorded calls read the present content of tensors when they are repeated."""
    wrong: tuple[tuple[str, Callable[..., Any], Arguments, str, tuple[int, ...], int, type[Exception], str], ...] = (
        (
            "block",
            paged_attention,
            attention_arguments,
            "block_tables_SM",
            (0, 1),
            B,
            IndexError,
            "block_tables[0, 1]",
        ),
        ("length", paged_attention, attention_arguments, "seq_lens_S", (1,), 99, ValueError, "seq_lens[1]"),
        ("sum", paged_attention, attention_arguments, "cu_seqlens_q_S1", (2,), 9, ValueError, "cu_seqlens_q[2]"),
        ("slot", rope_and_cache, rope_arguments, "slot_mapping_T", (1,), B * P, IndexError, "slot_mapping[1]"),
        ("adapter", add_lora, addition_arguments, "slots_T", (1,), 2, IndexError, "slots[1]"),
        (
            "adapter of a product",
            product_with_adapters,
            product_with_adapters_arguments,
            "slots_T",
            (1,),
            2,
            IndexError,
            "slots[1]",
        ),
        ("pair", expert_product, product_of_experts, "order_P", (1,), 6, IndexError, "order[1]"),
        ("begin", expert_product, product_of_experts, "begins", (1,), 7, IndexError, "begins[1]"),
        ("position", rope_and_cache, rope_arguments, "positions_T", (1,), L, IndexError, "positions[1]"),
    )
    for what, op, arguments, name, index, number, error, says in wrong:

        def repeat(op=op, arguments=arguments, name=name, index=index, number=number) -> None:
            given = arguments()
            _, calls = record(lambda: op(**given), Arena())
            given[name][index] = number
            for call in calls:
                call()

        yield Case(f"recorded: {what}", repeat, error, says, needs_kernels=True)


FAMILIES = (norms, activations, rope, attention, sampling, products, weights, additions, mixtures, threads, recorded)
CASES = [case for family in FAMILIES for case in family()]


def verdict(case: Case) -> str:
    """The fault in the result of a case; empty: none."""
    try:
        case.call()
    except Exception as error:
        if case.error is None or type(error) is not case.error or case.says not in str(error):
            return f"raised {type(error).__name__}: {error}"
        return ""
    return "" if case.error is None else "raised nothing"


def main(start: int, paths: list[str]) -> None:
    for index, (path, case) in enumerate(product(paths, CASES)):
        if index < start:
            continue
        print(f"{index} begins", flush=True)
        cpu._available = path == "kernels"
        skipped = case.needs_kernels and not cpu.available()
        print(f"{index} ends {'' if skipped else verdict(case)!r}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
