"""The GPU kernels of experts against the twins, on a GPU or under Triton's interpreter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from quire.formats.weight_format import GGUF, GroupedFormat
from quire.kernels import gpu, ops, reference, reference_experts
from quire.kernels.dense import PackedLinear, pack_linear
from quire.kernels.expert_stack import StackBuilder
from quire.kernels.experts import combine, expert_linear, route
from quire.kernels.fp8 import pack_fp8
from quire.kernels.fp8_weight import Fp8Weight
from quire.kernels.grouped import pack_grouped
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.routing import Routing, RoutingRule
from tests.examples import IS_FULL
from tests.kernels.grouped_weights import random_weight
from tests.kernels.test_experts import RULES, check_order, random_routing

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the test's device go where tensors of a GPU go."""
    monkeypatch.setattr(gpu, "serves", lambda device: device.type == DEVICE)


def on_device(routing: Routing) -> Routing:
    return Routing(*(x.to(DEVICE) for x in vars(routing).values()))


def dense_expert(N: int, K: int, e: int) -> tuple[PackedLinear, Tensor]:
    weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(e)).to(DEVICE) / K**0.5
    return pack_linear(weight_NK), weight_NK


def fp8_expert(group_size: int, N: int, K: int, e: int) -> tuple[object, Tensor]:
    random = torch.Generator().manual_seed(e)
    codes_NK = torch.randn(N, K, generator=random).to(torch.float8_e4m3fn).to(DEVICE)
    scales_NG = (torch.rand(N, -(-K // group_size), generator=random) / K**0.5).to(DEVICE)
    weight = Fp8Weight(codes_NK, scales_NG, group_size)
    return pack_fp8(weight), reference.dequantize_fp8(weight)


def grouped_expert(form: GroupedFormat, N: int, K: int, e: int) -> tuple[object, Tensor]:
    made = random_weight(form, N, K)
    rolled = {name: x.roll(e, 0).to(DEVICE) for name, x in vars(made).items() if isinstance(x, Tensor)}
    weight = GroupedWeight(**{**vars(made), **rolled})
    return pack_grouped(weight), reference.dequantize_grouped(weight)


FORMS = {
    "float32": dense_expert,
    "fp8": partial(fp8_expert, 128),
    "fp8 blocks": partial(fp8_expert, 32),
    "awq": partial(grouped_expert, GroupedFormat(4, 32, "float16", "uint8")),
    "act-order": partial(grouped_expert, GroupedFormat(8, 32, "float16", "uint8", is_ordered=True)),
    "Q3_K": partial(grouped_expert, GGUF["Q3_K"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_products_equal_the_twin(name: str) -> None:
    """Experts with more rows than a tile, with few, and without any; columns that fill no panel."""
    E, S, N, K, T = 5, 2, 70, 96, 24
    builder, weights = StackBuilder(E, N), []
    for e in (3, 0, 4, 1, 2):
        packed, weight_NK = FORMS[name](N, K, e)
        builder.put(e, packed)  # type: ignore[arg-type]
        weights.append((e, weight_NK))
    stack, weight_of = builder.finished(), dict(weights)
    logits_TE = torch.randn(T, E) + torch.tensor([3.0, 0.0, 0.0, 0.0, -9.0])
    routing = on_device(reference_experts.route(logits_TE, RoutingRule(E, S), None))
    bias_EN = torch.randn(E, N).to(DEVICE)
    for of_tokens in (True, False):
        x = torch.randn(T if of_tokens else T * S, K).to(DEVICE)
        for bias in (None, bias_EN) if IS_FULL else (bias_EN if of_tokens else None,):
            y_PN = expert_linear(x, stack, routing, of_tokens=of_tokens, bias_EN=bias)
            for p, pair in enumerate(routing.order_P.tolist()):
                e = int(routing.experts_TS.flatten()[pair])
                row = x[pair // S if of_tokens else p]
                expected = reference.linear(row[None], weight_of[e], None if bias is None else bias[e], torch.float32)
                torch.testing.assert_close(y_PN[p : p + 1], expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["float32", "act-order"])
def test_a_rank_computes_the_experts_of_its_places(name: str) -> None:
    """Experts lie in another order, and one of them has two copies. Rows of other ranks' experts are not written."""
    T, S, E, N, K, first, count = 24, 2, 5, 70, 96, 1, 4
    copies = torch.tensor([[3, 3], [0, 5], [4, 4], [1, 1], [2, 2]], dtype=torch.int32)  # places of each expert
    logits_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(5))
    twin = reference_experts.route(logits_TE, RoutingRule(E, S), None, copies, 6)
    routing = route(logits_TE.to(DEVICE), RoutingRule(E, S), None, copies.to(DEVICE), 6)
    for own, expected in zip(vars(routing).values(), vars(twin).values(), strict=True):
        torch.testing.assert_close(own.cpu(), expected)
    builder, weights = StackBuilder(count, N), []
    for place in range(count):
        packed, weight_NK = FORMS[name](N, K, place)
        builder.put(place, packed)  # type: ignore[arg-type]
        weights.append(weight_NK)
    begins = routing.begins.narrow(0, first, count + 1)
    ends = begins.tolist()
    for of_tokens in (True, False):
        x = torch.randn(T if of_tokens else T * S, K).to(DEVICE)
        y_PN = torch.full((T * S, N), 7.0).to(DEVICE)
        expert_linear(x, builder.finished(), routing, of_tokens=of_tokens, out=y_PN, first_place=first)
        y_PI = ops.gated_activation("silu", y_PN, torch.full_like(y_PN[:, : N // 2], 7.0), begins=begins)
        for p, pair in enumerate(routing.order_P.tolist()):
            if not ends[0] <= p < ends[-1]:
                assert bool((y_PN[p] == 7.0).all())
                assert bool((y_PI[p] == 7.0).all())
                continue
            weight_NK = weights[sum(end <= p for end in ends[1:])]
            row = x[pair // S if of_tokens else p]
            expected = reference.linear(row[None], weight_NK, None, torch.float32)
            torch.testing.assert_close(y_PN[p : p + 1], expected, atol=5e-5, rtol=1e-5)
            expected = reference.gated_activation("silu", y_PN[p : p + 1])
            torch.testing.assert_close(y_PI[p : p + 1], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_routes_like_the_twin(name: str) -> None:
    rule = RULES[name]
    T, E = 9, rule.num_experts
    logits_TE = torch.randn(T, E + 3, generator=torch.Generator().manual_seed(3))[:, :E]
    logits_TE[1] = logits_TE[1].round()  # ties
    logits_TE[2, E - 1] = float("nan")
    logits_TE[5, 0] = float("inf")
    for bias_E in (None, torch.randn(E, generator=torch.Generator().manual_seed(4))):
        if bias_E is not None and rule.scoring == "sparsemixer":
            continue
        twin = reference_experts.route(logits_TE, rule, bias_E)
        got = route(logits_TE.to(DEVICE), rule, None if bias_E is None else bias_E.to(DEVICE))
        assert torch.equal(got.experts_TS.cpu(), twin.experts_TS)
        torch.testing.assert_close(got.weights_TS.cpu(), twin.weights_TS, atol=1e-6, rtol=1e-5, equal_nan=True)
        check_order(got, E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combines_like_the_twin(dtype: torch.dtype) -> None:
    T, E, S, D = 7, 6, 3, 1030
    routing = on_device(random_routing(T, E, S))
    y_PD = torch.randn(T * S, D + 5).to(DEVICE, dtype)[:, :D]
    shared_TD, gate_T1 = torch.randn(T, D).to(DEVICE, dtype), torch.randn(T, 1).to(DEVICE)
    for shared, gate in ((None, None), (shared_TD, None), (shared_TD, gate_T1)):
        # the interpreter cuts bfloat16 off where a GPU rounds
        atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 1.6e-2)
        expected = reference_experts.combine(y_PD, routing, shared, gate)
        torch.testing.assert_close(combine(y_PD, routing, shared, gate), expected, atol=atol, rtol=rtol)


def test_combines_in_the_order_of_slots() -> None:
    """Float sums depend on it: 1 is lost beside 1e8."""
    ids = torch.arange(4, dtype=torch.int32)
    routing = Routing(ids[None, :3], torch.ones(1, 3), ids[:3], ids)
    y_PD = torch.tensor([[1e8], [-1e8], [1.0]]).expand(3, 37).contiguous()
    assert torch.equal(reference_experts.combine(y_PD, routing, None, None), torch.ones(1, 37))
    assert torch.equal(combine(y_PD.to(DEVICE), on_device(routing)).cpu(), torch.ones(1, 37))


def test_no_tokens() -> None:
    rule = RoutingRule(4, 2)
    routing = route(torch.empty(0, 4, device=DEVICE), rule)
    assert routing.begins.tolist() == [0] * 5
    assert combine(torch.empty(0, 8, device=DEVICE), routing).shape == (0, 8)
