"""The ops of mixture-of-experts layers: compiled kernels on CPU, Triton on GPU, plain torch otherwise.

The bits of a row depend only on the row: the product with an expert has the same bits as `linear` with the weight of
this expert. Arguments are checked as in ops.py.

Dimensions: T tokens, E experts, S slots (active experts of a token), P = T * S pairs of a token and a slot, K
in-features, N out-features, D hidden.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quire.kernels import cpu, gpu, reference, reference_experts
from quire.kernels.dense import PackedLinear, linear
from quire.kernels.expert_stack import Packed, PackedStack
from quire.kernels.fp8 import PackedFp8, fp8_linear
from quire.kernels.grouped import PackedGrouped, grouped_linear
from quire.kernels.guards import check_contiguous, check_dtype, check_last_stride, check_places, check_shape
from quire.kernels.product import check_result_dtype
from quire.kernels.routing import Routing, RoutingRule


def route(
    logits_TE: Tensor,
    rule: RoutingRule,
    bias_E: Tensor | None = None,
    places_EC: Tensor | None = None,
    num_places: int | None = None,
) -> Routing:
    """Choose the experts of each token and their weights.

    If scores are equal, the expert with the lower number comes first. A row with a logit that is not finite gets the
    experts 0 to S - 1 and NaN weights; other rows do not change.

    Args:
        logits_TE: the router's logits, float32; rows may be strided.
        bias_E: float32. It is added to the scores for the choice, but not for the weights (DeepSeek-V3, arXiv
            2412.19437).
        places_EC: int32 in [0, num_places): the places of the C copies of each expert; some may be equal. Token t goes
            to copy t % C. None: the place of an expert is its number.
        num_places: the number of places, given together with `places_EC`.

    Raises:
        ValueError, TypeError: a shape, a stride, a device or a dtype does not fit.
    """
    E = rule.num_experts
    check_places(logits=logits_TE, bias=bias_E)
    if logits_TE.dim() != 2 or logits_TE.shape[1] != E:
        raise ValueError(f"logits is {list(logits_TE.shape)}, expected [T, {E}]")
    check_dtype("logits", logits_TE, torch.float32)
    check_last_stride(logits=logits_TE)
    if bias_E is not None:
        check_shape("bias", bias_E, E)
        check_dtype("bias", bias_E, torch.float32)
        check_contiguous(bias=bias_E)
        if rule.scoring == "sparsemixer":
            raise ValueError("a bias with the scoring sparsemixer, expected none")
    if (places_EC is None) != (num_places is None):
        raise ValueError("places without their number, or the reverse: expected both or none")
    if places_EC is not None:
        check_places(logits=logits_TE, places=places_EC)
        if places_EC.dim() != 2 or places_EC.shape[0] != E or places_EC.shape[1] == 0:
            raise ValueError(f"places is {list(places_EC.shape)}, expected [{E}, C], C not 0")
        check_dtype("places", places_EC, torch.int32)
        check_contiguous(places=places_EC)
    kernels: Any = gpu.kernels() if gpu.takes(logits_TE) else cpu if cpu.takes(logits_TE) else None
    if kernels is None:
        return reference_experts.route(logits_TE, rule, bias_E, places_EC, num_places)
    T, S, device = logits_TE.shape[0], rule.num_active, logits_TE.device
    routing = Routing(
        torch.empty((T, S), dtype=torch.int32, device=device),
        torch.empty((T, S), dtype=torch.float32, device=device),
        torch.empty((T * S,), dtype=torch.int32, device=device),
        torch.empty(((E if num_places is None else num_places) + 1,), dtype=torch.int32, device=device),
    )
    kernels.route(logits_TE, rule, bias_E, routing, places_EC)
    return routing


def expert_linear(
    x: Tensor,
    stack: PackedStack,
    routing: Routing,
    *,
    of_tokens: bool,
    bias_EN: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    first_place: int | None = None,
) -> Tensor:
    """For each pair of a token and an expert: a row of x times the expert's weight, plus its bias.

    The result is [P, N], in the order of routing.order_P. A row has the arithmetic of `linear`, `fp8_linear` or
    `grouped_linear`. It is rounded once, to `out_dtype` or x's dtype.

    Args:
        x: float32, bfloat16 or float16; for a dense stack, the dtype of the stack. Rows may be strided.
        of_tokens: True: x is [T, K], and a pair reads the row of its token. False: x is [P, K], in the order of the
            result.
        bias_EN: float32, bfloat16 or float16; None: there is no bias.
        out: memory for the result; rows may be strided. None: new memory.
        first_place: expert e of the stack has the place first_place + e, and rows of other places are not written.
            None: the stack has all experts.

    Raises:
        ValueError, TypeError: a shape, a stride, a device or a dtype does not fit.
    """
    T, S = _check_routing(routing, stack.E if first_place is None else None)
    first = first_place or 0
    if first + stack.E >= routing.begins.shape[0]:
        raise ValueError(f"experts from place {first}, expected {stack.E} of {routing.begins.shape[0] - 1}")
    rows = T if of_tokens else T * S
    check_places(x=x, weight=stack.tensor, order=routing.order_P, bias=bias_EN)
    check_shape("x", x, rows, stack.K)
    check_dtype("x", x, *((stack.weight.dtype,) if isinstance(stack.weight, PackedLinear) else cpu.DTYPE_CODES))
    check_last_stride(x=x)
    if bias_EN is not None:
        check_shape("bias", bias_EN, stack.E, stack.N)
        check_dtype("bias", bias_EN, *cpu.DTYPE_CODES)
        check_contiguous(bias=bias_EN)
    if out is None:
        dtype = out_dtype or x.dtype
        check_result_dtype(dtype)
        y_PN = torch.empty((T * S, stack.N), dtype=dtype, device=x.device)
    else:
        check_places(x=x, out=out)
        check_shape("out", out, T * S, stack.N)
        check_dtype("out", out, *((out_dtype,) if out_dtype else cpu.DTYPE_CODES))
        check_last_stride(out=out)
        y_PN, dtype = out, out.dtype
    if gpu.takes(x):
        _multiply_on_gpu(x, stack, routing, of_tokens, bias_EN, y_PN, first)
        return y_PN
    if stack.is_packed and cpu.takes(x):
        cpu.expert_linear(x, stack.panels, routing, of_tokens, bias_EN, y_PN, first)
        return y_PN
    begins = reference_experts.check_pairs(routing)[first : first + stack.E + 1]
    for e, (begin, end) in enumerate(pairwise(begins)):
        if begin < end:
            rows_X = routing.order_P[begin:end] // S if of_tokens else torch.arange(begin, end, device=x.device)
            y_PN[begin:end] = _product(x[rows_X], stack.expert(e), None if bias_EN is None else bias_EN[e], dtype)
    return y_PN


def _multiply_on_gpu(
    x: Tensor, stack: PackedStack, routing: Routing, of_tokens: bool, bias_EN: Tensor | None, y_PN: Tensor, first: int
) -> None:
    """`first`: the place of the stack's first expert."""
    weight, S = stack.weight, routing.num_slots
    begins = routing.begins.narrow(0, first, stack.E + 1)
    if isinstance(weight, PackedGrouped) and weight.order_K is not None:
        rows_P = torch.arange(len(routing.order_P), dtype=torch.int32, device=x.device)
        experts_P = torch.bucketize(rows_P, begins[1:-1], right=True)  # rows of other ranks' experts get any of them
        x = (x[routing.order_P.long() // S] if of_tokens else x).gather(1, weight.order_K[experts_P].long())
        of_tokens = False
    rows = gpu.kernels().ExpertRows(begins, routing.order_P, stack.E, S, of_tokens)
    match weight:
        case PackedLinear():
            gpu.kernels().linear(x, weight.data, bias_EN, y_PN, rows)
        case PackedFp8():
            assert weight.weight is not None
            codes_NK, scales_NG = weight.weight.codes_NK, weight.weight.scales_NG
            gpu.kernels().fp8_linear(x, codes_NK, scales_NG, weight.group_size, bias_EN, y_PN, rows)
        case _:
            gpu.kernels().grouped_linear(x, weight.data, stack.N, weight.format, bias_EN, y_PN, rows)


def _product(x_TK: Tensor, packed: Packed, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    match packed:
        case PackedLinear():
            return linear(x_TK, packed, bias_N, out_dtype=dtype)
        case PackedFp8():
            return fp8_linear(x_TK, packed, bias_N, dtype)
        case _:
            return grouped_linear(x_TK, packed, bias_N, dtype)


def combine(
    y_PD: Tensor, routing: Routing, shared_TD: Tensor | None = None, shared_gate_T1: Tensor | None = None
) -> Tensor:
    """The weighted sum of the rows of each token, [T, D]. Sums are float32, in the order of slots, and rounded once.

    Args:
        y_PD: rows in the order of routing.order_P, float32, bfloat16 or float16; rows may be strided.
        shared_TD: the result of the shared expert, in y's dtype. It is added at the end. Rows may be strided.
        shared_gate_T1: float32. Its sigmoid multiplies shared_TD (Qwen2-MoE); None: nothing multiplies it.

    Raises:
        ValueError, TypeError: a shape, a stride, a device or a dtype does not fit.
    """
    T, S = _check_routing(routing, None)
    if y_PD.dim() != 2 or y_PD.shape[0] != T * S or y_PD.shape[1] == 0:
        raise ValueError(f"y is {list(y_PD.shape)}, expected [{T * S}, D], D not 0")
    check_places(y=y_PD, order=routing.order_P, shared=shared_TD, shared_gate=shared_gate_T1)
    check_dtype("y", y_PD, *cpu.DTYPE_CODES)
    check_last_stride(y=y_PD, shared=shared_TD)
    if shared_TD is not None:
        check_shape("shared", shared_TD, T, y_PD.shape[1])
        check_dtype("shared", shared_TD, y_PD.dtype)
    if shared_gate_T1 is not None:
        if shared_TD is None:
            raise ValueError("shared_gate without shared, expected both")
        check_shape("shared_gate", shared_gate_T1, T, 1)
        check_dtype("shared_gate", shared_gate_T1, torch.float32)
    kernels: Any = gpu.kernels() if gpu.takes(y_PD) else cpu if cpu.takes(y_PD) else None
    if kernels is not None:
        out_TD = torch.empty((T, y_PD.shape[1]), dtype=y_PD.dtype, device=y_PD.device)
        kernels.combine(y_PD, routing, shared_TD, shared_gate_T1, out_TD)
        return out_TD
    reference.check_indices("order", routing.order_P, T * S)
    return reference_experts.combine(y_PD, routing, shared_TD, shared_gate_T1)


def _check_routing(routing: Routing, num_experts: int | None) -> tuple[int, int]:
    """Check the tensors of a routing. Returns T and S.

    Args:
        num_experts: the number of experts or places; None: it is not checked.
    """
    experts_TS, weights_TS, order_P, begins = vars(routing).values()
    check_places(experts=experts_TS, weights=weights_TS, order=order_P, begins=begins)
    if experts_TS.dim() != 2:
        raise ValueError(f"experts is {list(experts_TS.shape)}, expected [T, S]")
    T, S = experts_TS.shape
    check_shape("weights", weights_TS, T, S)
    check_shape("order", order_P, T * S)
    check_dtype("weights", weights_TS, torch.float32)
    check_dtype("order", order_P, torch.int32)
    check_dtype("begins", begins, torch.int32)
    check_contiguous(weights=weights_TS, order=order_P, begins=begins)
    if num_experts is not None:
        check_shape("begins", begins, num_experts + 1)
    return T, S
