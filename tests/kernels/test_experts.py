"""Routing, products and sums of experts against arithmetic that is written out here, and against `linear`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire.formats.weight_format import GroupedFormat
from quire.kernels import cpu, ops
from quire.kernels.dense import PackedLinear, linear, pack_linear
from quire.kernels.expert_stack import Packed, PackedStack, StackBuilder
from quire.kernels.experts import combine, expert_linear, route
from quire.kernels.fp8 import PackedFp8, fp8_linear, pack_fp8, quantize_fp8
from quire.kernels.fp8_weight import Fp8Weight
from quire.kernels.grouped import grouped_linear, pack_grouped
from quire.kernels.recording import Arena, record
from quire.kernels.routing import Routing, RoutingRule
from quire.kernels.weight_memory import WEIGHTS, Memory
from tests.kernels.grouped_weights import FORMATS, random_weight

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def product(x_TK: Tensor, packed: Packed, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    match packed:
        case PackedLinear():
            return linear(x_TK, packed, bias_N, out_dtype=dtype)
        case PackedFp8():
            return fp8_linear(x_TK, packed, bias_N, dtype)
        case _:
            return grouped_linear(x_TK, packed, bias_N, dtype)


def randoms(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(dtype: torch.dtype, N: int, K: int, e: int, memory: Memory = WEIGHTS) -> Packed:
    weight = (torch.randn(N, K, generator=randoms(e)) / K**0.5).to(dtype)
    return pack_linear(weight, memory)


def fp8_channels(N: int, K: int, e: int, memory: Memory = WEIGHTS) -> Packed:
    return pack_fp8(quantize_fp8(torch.randn(N, K, generator=randoms(e)) / K**0.5), memory)


def fp8_blocks(N: int, K: int, e: int, memory: Memory = WEIGHTS) -> Packed:
    codes_NK = torch.randn(N, K, generator=randoms(e)).to(torch.float8_e4m3fn)
    return pack_fp8(Fp8Weight(codes_NK, torch.rand(N, -(-K // 128), generator=randoms(e)) / K**0.5, 128), memory)


def grouped(form: GroupedFormat, N: int, K: int, e: int, memory: Memory = WEIGHTS) -> Packed:
    weight = random_weight(form, N, K)
    changed = replace(weight, codes_NK=weight.codes_NK.roll(e, 0))
    if weight.order_K is not None:
        changed = replace(changed, order_K=weight.order_K.roll(e))
    return pack_grouped(changed, memory)


Made = Callable[..., Packed]
FORMS: dict[str, Made] = {
    **{str(dtype).removeprefix("torch."): partial(dense, dtype) for dtype in (F32, BF16, F16)},
    "fp8": fp8_channels,
    "fp8 blocks": fp8_blocks,
    **{f"{i} {form.bits} bits, {form.group_size}": partial(grouped, form) for i, form in enumerate(FORMATS)},
}


def stack_of(made: Made, E: int, N: int, K: int) -> PackedStack:
    """Filled from the last expert to the first."""
    builder = StackBuilder(E, N)
    for e in reversed(range(E)):
        assert not builder.is_complete
        builder.put(e, made(N, K, e, builder.memory(e)))
    return builder.finished()


def random_routing(T: int, E: int, S: int, seed: int = 0) -> Routing:
    return route(torch.randn(T, E, generator=randoms(seed)), RoutingRule(E, S))


@pytest.mark.parametrize("name", FORMS)
def test_a_stack_holds_the_weights_of_its_experts(name: str) -> None:
    E, N, K = 3, 70, 96
    made = FORMS[name]
    stack = stack_of(made, E, N, K)
    x = torch.randn(5, K, generator=randoms(9)).to(
        stack.weight.dtype if isinstance(stack.weight, PackedLinear) else F32
    )
    for e in range(E):
        alone = made(N, K, e)
        assert torch.equal(product(x, stack.expert(e), None, F32), product(x, alone, None, F32))
    assert stack.nbytes == E * alone.nbytes


def test_a_stack_is_filled_in_place() -> None:
    builder = StackBuilder(2, 70)
    panels = pack_linear(torch.ones(70, 33), builder.memory(1))
    builder.put(1, panels)
    builder.put(0, pack_linear(torch.ones(70, 33)))  # from elsewhere: copied
    stack = builder.finished()
    if cpu.available():
        assert stack.expert(1).data is not None
        assert stack.expert(1).data.data_ptr() == panels.data.data_ptr()  # type: ignore[union-attr]
    assert torch.equal(product(torch.ones(1, 33), stack.expert(0), None, F32), torch.full((1, 70), 33.0))


def test_a_stack_has_one_form() -> None:
    builder = StackBuilder(4, 70)
    builder.put(2, pack_linear(torch.ones(70, 64)))
    with pytest.raises(ValueError, match="expert 2 came already"):
        builder.put(2, pack_linear(torch.ones(70, 64)))
    with pytest.raises(ValueError, match=r"expert 4 came already, or is not in \[0, 4\)"):
        builder.put(4, pack_linear(torch.ones(70, 64)))
    with pytest.raises(ValueError, match="expert 0 has 69 out-features, expected 70"):
        builder.put(0, pack_linear(torch.ones(69, 64)))
    for wrong in (pack_linear(torch.ones(70, 65)), pack_linear(torch.ones(70, 64).half())):
        with pytest.raises(ValueError, match=r"expected 64 in-features in torch\.float32 like the experts before it"):
            builder.put(0, wrong)


def test_scales_of_two_widths_become_float32() -> None:
    """Checkpoints have scales that float16 holds in most experts, and perhaps not in all."""
    E, N, K = 4, 70, 96
    form = GroupedFormat(4, 32, "float16", "uint8", is_ordered=True)
    half, x = random_weight(form, N, K), torch.randn(3, K)
    wide = replace(half, scales_NG=half.scales_NG.float() * 1.001)
    alone = [product(x, pack_grouped(weight), None, F32) for weight in (half, wide)]
    for widths in ((0, 1, 0, 1), (1, 0, 0, 1)):
        builder = StackBuilder(E, N)
        for e in (2, 1, 3, 0):
            builder.put(e, pack_grouped((half, wide)[widths[e]], builder.memory(e)))
        stack = builder.finished()
        for e in range(E):
            assert torch.equal(product(x, stack.expert(e), None, F32), alone[widths[e]])


@pytest.mark.parametrize("of_tokens", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_bits_are_those_of_an_expert_alone(name: str, of_tokens: bool) -> None:
    E, S, N, K, T = 5, 2, 70, 96, 9
    stack = stack_of(FORMS[name], E, N, K)
    dtype = stack.weight.dtype if isinstance(stack.weight, PackedLinear) else BF16
    routing = random_routing(T, E, S)
    x = torch.randn(T if of_tokens else T * S, K, generator=randoms(1)).to(dtype)
    bias_EN = torch.randn(E, N, generator=randoms(2))
    for out_dtype in (dtype, F32):
        y_PN = expert_linear(x, stack, routing, of_tokens=of_tokens, bias_EN=bias_EN, out_dtype=out_dtype)
        for p, pair in enumerate(routing.order_P.tolist()):
            e = int(routing.experts_TS.flatten()[pair])
            row = pair // S if of_tokens else p
            assert torch.equal(y_PN[p : p + 1], product(x[row : row + 1], stack.expert(e), bias_EN[e], out_dtype))


@pytest.mark.parametrize("name", ["bfloat16", "float32", "fp8", "fp8 blocks", "3 4 bits, 128", "9 4 bits, 32"])
def test_bits_depend_on_the_row_alone(isa: str, name: str, set_num_threads: Callable[[int], None]) -> None:
    """One expert with many rows, some with few, some without any; several panels; any threads; alone."""
    E, S, N, K, T = 6, 2, 330, 288, 150
    stack = stack_of(FORMS[name], E, N, K)
    dtype = stack.weight.dtype if isinstance(stack.weight, PackedLinear) else BF16
    logits = torch.randn(T, E, generator=randoms(3)) + torch.tensor([4.0, 1.0, 0.0, 0.0, -9.0, -9.0])
    routing = route(logits, RoutingRule(E, S))
    assert 0 in routing.begins.diff()
    x_TK = torch.randn(T, K + 5, generator=randoms(1)).to(dtype)[:, :K]
    y_PN = expert_linear(x_TK, stack, routing, of_tokens=True)
    set_num_threads(3)
    assert torch.equal(expert_linear(x_TK, stack, routing, of_tokens=True), y_PN)
    for t in (0, 7, T - 1):
        alone = expert_linear(x_TK[t : t + 1], stack, route(logits[t : t + 1], RoutingRule(E, S)), of_tokens=True)
        places = [p for p, pair in enumerate(routing.order_P.tolist()) if pair // S == t]
        assert torch.equal(y_PN[places], alone)
    for e, (begin, end) in enumerate(pairwise(routing.begins.tolist())):
        rows = routing.order_P[begin:end] // S
        assert torch.equal(y_PN[begin:end], product(x_TK[rows], stack.expert(e), None, dtype))


@pytest.mark.skipif(not cpu.available(), reason="needs the compiled kernels")
def test_a_recorded_layer_reads_its_hits_anew() -> None:
    E, S, D, width, T = 6, 2, 96, 70, 5
    up, down = stack_of(FORMS["bfloat16"], E, 2 * width, D), stack_of(FORMS["9 4 bits, 32"], E, D, width)
    logits, x_TD = torch.empty(T, E), torch.empty(T, D, dtype=BF16)
    rule = RoutingRule(E, S)

    def layer() -> Tensor:
        routing = route(logits, rule)
        y = ops.gated_activation("silu", expert_linear(x_TD, up, routing, of_tokens=True))
        return combine(expert_linear(y, down, routing, of_tokens=False), routing, x_TD)

    logits.normal_(generator=randoms(1))
    x_TD.normal_(generator=randoms(2))
    arena = Arena()  # lives as long as the calls
    out_TD, calls = record(layer, arena)
    assert calls is not None
    for seed in (3, 4):
        logits.normal_(generator=randoms(seed))
        x_TD.normal_(generator=randoms(seed + 10))
        for call in calls:
            call()
        assert torch.equal(out_TD, layer())


def test_no_tokens() -> None:
    stack, rule = stack_of(FORMS["float32"], 3, 70, 64), RoutingRule(3, 2)
    routing = route(torch.empty(0, 3), rule)
    assert routing.begins.tolist() == [0] * 4
    y_PN = expert_linear(torch.empty(0, 64), stack, routing, of_tokens=True)
    assert combine(y_PN, routing).shape == (0, 70)


@pytest.mark.skipif(not cpu.available(), reason="needs the compiled kernels")
def test_the_bindings_believe_no_size() -> None:
    """Without the checks of `expert_linear` and `combine` before them."""
    E, N, K, T, S = 3, 70, 64, 5, 2
    stack, routing = stack_of(FORMS["float32"], E, N, K), random_routing(T, E, S)
    x, y, out = torch.rand(T, K), torch.rand(T * S, N), torch.rand(T, N)

    def product_of(**changes: object) -> None:
        arguments = {"x": x, "stack": stack.panels, "routing": routing, "of_tokens": True, "bias_EN": None, "out_PN": y}
        cpu.expert_linear(*(arguments | changes).values())

    product_of()
    cpu.combine(y, routing, None, None, out)
    cut = {name: tensor[:-1] for name, tensor in vars(routing).items()}
    for wrong in (
        lambda: product_of(x=x[:-1]),
        lambda: product_of(x=x[:, :-1]),
        lambda: product_of(of_tokens=False),
        lambda: product_of(bias_EN=torch.rand(E - 1, N)),
        lambda: product_of(bias_EN=torch.rand(E, N + 1)),
        lambda: product_of(out_PN=y[:-1]),
        lambda: product_of(out_PN=torch.rand(T * S, N - 1)),
        lambda: product_of(routing=replace(routing, begins=cut["begins"])),
        lambda: product_of(routing=replace(routing, order_P=cut["order_P"])),
        lambda: product_of(stack=cpu.expert_stack(stack.expert(0).panels, 0)),
        lambda: cpu.combine(y[:-1], routing, None, None, out),
        lambda: cpu.combine(y, replace(routing, order_P=cut["order_P"]), None, None, out),
        lambda: cpu.combine(y, replace(routing, weights_TS=cut["weights_TS"]), None, None, out),
        lambda: cpu.combine(y, routing, torch.rand(T - 1, N), None, out),
        lambda: cpu.combine(y, routing, torch.rand(T, N), torch.rand(T, 2), out),
        lambda: cpu.combine(y, routing, None, None, out[:, :-1]),
        lambda: cpu.route(torch.rand(T, E + 1), RoutingRule(E, S), None, routing),
        lambda: cpu.route(torch.rand(T, E), RoutingRule(E, S), torch.rand(E - 1), routing),
        lambda: cpu.route(torch.rand(T, E), RoutingRule(E, S + 1), None, routing),
        lambda: cpu.route(torch.rand(T, E), RoutingRule(E, S), None, replace(routing, **cut)),
    ):
        with pytest.raises(ValueError, match=r"expected|0 experts"):
            wrong()


RULES = {
    "softmax": RoutingRule(16, 4),
    "softmax, normalized": RoutingRule(16, 4, normalizes=True, scale=2.5),
    "sigmoid": RoutingRule(16, 3, "sigmoid", normalizes=True),
    "softmax of chosen": RoutingRule(16, 4, "softmax_of_chosen"),
    "groups by max": RoutingRule(16, 3, num_groups=4, num_active_groups=2, scale=16.0),
    "groups by top2": RoutingRule(16, 6, "sigmoid", 4, 2, "top2", normalizes=True, scale=2.5),
    "groups by top2, softmax": RoutingRule(16, 6, "softmax", 4, 2, "top2"),
    "sparsemixer": RoutingRule(16, 2, "sparsemixer", jitter=0.01),
    "all": RoutingRule(3, 3, "softmax_of_chosen"),
    "one": RoutingRule(1, 1),
    "llama 4": RoutingRule(16, 1, "sigmoid"),
}


def experts_of(logits: list[float], rule: RoutingRule, bias: list[float] | None) -> tuple[list[int], list[float]]:
    """One row, by Python's numbers."""
    E = rule.num_experts
    if rule.scoring == "sparsemixer":
        return sparse_experts(logits, rule)
    largest = max(logits)
    exps = [math.exp(x - largest) for x in logits]
    scores = {
        "softmax": [x / sum(exps) for x in exps],
        "sigmoid": [1 / (1 + math.exp(-x)) for x in logits],
        "softmax_of_chosen": logits,
    }[rule.scoring]
    choice = [s + b for s, b in zip(scores, bias or [0.0] * E, strict=True)]
    size = E // rule.num_groups

    def score_of(g: int) -> float:
        best = sorted(choice[g * size : (g + 1) * size], reverse=True)
        return best[0] if rule.group_score == "max" else best[0] + best[1]

    groups = sorted(range(rule.num_groups), key=lambda g: -score_of(g))[: rule.num_active_groups]
    left = [e for e in range(E) if e // size in groups]
    chosen = sorted(left, key=lambda e: -choice[e])[: rule.num_active]
    weights = [scores[e] for e in chosen]
    if rule.scoring == "softmax_of_chosen":
        weights = [math.exp(w - max(weights)) for w in weights]
        weights = [w / sum(weights) for w in weights]
    if rule.normalizes:
        weights = [w / sum(weights) for w in weights]
    return chosen, [w * rule.scale for w in weights]


def sparse_experts(logits: list[float], rule: RoutingRule) -> tuple[list[int], list[float]]:
    left, chosen, weights = list(range(rule.num_experts)), [], []
    for _ in range(rule.num_active):
        best = max(left, key=lambda e: logits[e])
        near = [e for e in left if (logits[best] - logits[e]) / max(abs(logits[e]), logits[best]) <= 2 * rule.jitter]
        weights.append(1 / sum(math.exp(logits[e] - logits[best]) for e in near))
        chosen.append(best)
        left.remove(best)
    return chosen, weights


@pytest.mark.parametrize(
    ("name", "has_bias"), [(n, b) for n in RULES for b in (False, True) if not (b and n == "sparsemixer")]
)
def test_routes(name: str, has_bias: bool) -> None:
    rule = RULES[name]
    T, E = 33, rule.num_experts
    logits = torch.randn(T, E + 3, generator=randoms(3))[:, :E] * 2
    bias = torch.randn(E, generator=randoms(4)) if has_bias else None
    routing = route(logits, rule, bias)
    for t in range(T):
        chosen, weights = experts_of(logits[t].tolist(), rule, None if bias is None else bias.tolist())
        assert routing.experts_TS[t].tolist() == chosen
        assert routing.weights_TS[t].tolist() == pytest.approx(weights, rel=2e-6)
    check_order(routing, E)


def check_order(routing: Routing, E: int) -> None:
    experts_P, order = routing.experts_TS.flatten().tolist(), routing.order_P.tolist()
    assert order == sorted(range(len(order)), key=lambda p: (experts_P[p], p))
    assert routing.begins.tolist() == [sum(e < n for e in experts_P) for n in range(E + 1)]


def test_ties_go_to_the_lower_expert() -> None:
    logits = torch.zeros(2, 8)
    logits[1, [2, 5, 7]] = 1.0
    for scoring in ("softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"):
        routing = route(logits, RoutingRule(8, 3, scoring))
        assert routing.experts_TS.tolist() == [[0, 1, 2], [2, 5, 7]]
    in_groups = route(logits, RoutingRule(8, 3, num_groups=4, num_active_groups=2))
    assert in_groups.experts_TS.tolist() == [[0, 1, 2], [2, 5, 3]]


def logits_with_a_broken_row(rule: RoutingRule) -> Iterator[tuple[Tensor, int]]:
    for row, value in ((0, math.nan), (2, -math.inf), (1, math.inf)):
        logits = torch.randn(4, rule.num_experts, generator=randoms(5))
        logits[row, 3 % rule.num_experts] = value
        yield logits, row


@pytest.mark.parametrize("name", RULES)
def test_a_broken_row_is_alone(name: str) -> None:
    rule = RULES[name]
    for logits, row in logits_with_a_broken_row(rule):
        routing = route(logits, rule)
        assert routing.weights_TS[row].isnan().all()
        assert routing.experts_TS[row].tolist() == list(range(rule.num_active))
        others = [t for t in range(4) if t != row]
        without = route(logits[others], rule)
        assert torch.equal(routing.weights_TS[others], without.weights_TS)
        assert torch.equal(routing.experts_TS[others], without.experts_TS)
        check_order(routing, rule.num_experts)
        y_PD = torch.ones(4 * rule.num_active, 5)
        assert combine(y_PD, routing).isnan().any(1).tolist() == [t == row for t in range(4)]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_combines(dtype: torch.dtype) -> None:
    T, E, S, D = 7, 6, 3, 37
    routing = random_routing(T, E, S)
    y_PD = torch.randn(T * S, D + 5, generator=randoms(6)).to(dtype)[:, :D]
    shared_TD = torch.randn(T, D, generator=randoms(7)).to(dtype)
    gate_T1 = torch.randn(T, 1, generator=randoms(8))
    sums_TD = torch.zeros(T, D, dtype=torch.float64)
    for p, pair in enumerate(routing.order_P.tolist()):
        sums_TD[pair // S] += routing.weights_TS.flatten()[pair].double() * y_PD[p].double()
    gated_TD = gate_T1.double().sigmoid() * shared_TD.double()
    tolerance = {F32: 1e-6, F16: 1e-3, BF16: 8e-3}[dtype]
    for got, expected in (
        (combine(y_PD, routing), sums_TD),
        (combine(y_PD, routing, shared_TD), sums_TD + shared_TD.double()),
        (combine(y_PD, routing, shared_TD, gate_T1), sums_TD + gated_TD),
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_rank_computes_the_experts_of_its_places() -> None:
    """Experts lie in another order, and one of them has two copies, which tokens take in turns."""
    T, S, E, N, K = 9, 3, 5, 40, 64
    rule, logits_TE = RoutingRule(E, S), torch.randn(T, E, generator=randoms(1))
    whole = route(logits_TE, rule)
    copies = [[3, 3], [0, 5], [4, 4], [1, 1], [2, 2]]  # places of each expert
    placed = route(logits_TE, rule, None, torch.tensor(copies, dtype=torch.int32), 6)
    assert torch.equal(placed.experts_TS, whole.experts_TS)
    assert torch.equal(placed.weights_TS, whole.weights_TS)
    expert_at = {place: e for e, places in enumerate(copies) for place in places}
    for place, (begin, end) in enumerate(pairwise(placed.begins.tolist())):
        pairs = placed.order_P[begin:end].tolist()
        assert pairs == sorted(pairs)
        for pair in pairs:
            expert = int(whole.experts_TS.flatten()[pair])
            assert expert == expert_at[place]
            assert copies[expert][pair // S % 2] == place
    assert sorted(placed.order_P.tolist()) == list(range(T * S))

    x_TK, first, count = torch.randn(T, K, generator=randoms(2)), 1, 4
    y_PN = expert_linear(x_TK, stack_of(FORMS["float32"], E, N, K), whole, of_tokens=True)
    own = StackBuilder(count, N)
    for e in range(count):
        own.put(e, FORMS["float32"](N, K, expert_at[first + e]))
    y_of_pair = dict(zip(whole.order_P.tolist(), y_PN, strict=True))
    out_PN = torch.full((T * S, N), 7.0)
    expert_linear(x_TK, own.finished(), placed, of_tokens=True, out=out_PN, first_place=first)
    begins = placed.begins.narrow(0, first, count + 1)
    act_PI = ops.gated_activation("silu", out_PN)
    some_PI = ops.gated_activation("silu", out_PN, torch.full_like(act_PI, 7.0), begins=begins)
    for p, pair in enumerate(placed.order_P.tolist()):
        is_own = int(begins[0]) <= p < int(begins[-1])
        assert torch.equal(out_PN[p], y_of_pair[pair] if is_own else torch.full((N,), 7.0))
        if is_own or not cpu.available():
            assert torch.equal(some_PI[p], act_PI[p])
        else:
            assert bool((some_PI[p] == 7.0).all())


@pytest.mark.parametrize(("first", "message"), [(3, "experts from place 3, expected 4 of 6"), (-1, "place -1")])
def test_places_that_a_routing_has_not(first: int, message: str) -> None:
    routing = random_routing(2, 6, 2)
    with pytest.raises(ValueError, match=message):
        expert_linear(
            torch.ones(2, 64), stack_of(FORMS["float32"], 4, 40, 64), routing, of_tokens=True, first_place=first
        )


def test_combines_in_the_order_of_slots() -> None:
    """Float sums depend on it: 1 is lost beside 1e8."""
    ids = torch.arange(4, dtype=torch.int32)
    routing = Routing(ids[None, :3], torch.ones(1, 3), ids[:3], ids)
    y_PD = torch.tensor([[1e8], [-1e8], [1.0]]).expand(3, 37).contiguous()
    assert torch.equal(combine(y_PD, routing), torch.ones(1, 37))
