"""The bytes and operations of a step: against counting token by token, and by hand on the demo model's sizes."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cost.arithmetic import LayerKind, StepArithmetic
from quire.formats.kv_format import kv_format
from quire.layer_spec.attention import Full
from tests.cost.models import BOUND, model_with
from tests.models.test_layer_spec import experts

ROWS = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 60) | st.just(1)), min_size=1, max_size=6)
KINDS = ("full", "window", "chunked", "state")


def seen_by(kind: LayerKind, position: int) -> set[int]:
    """The positions whose keys the token at `position` reads."""
    first = {
        "full": 0,
        "window": max(position - BOUND + 1, 0),
        "chunked": position // BOUND * BOUND,
        "state": position + 1,
    }[kind.kind]
    return set(range(first, position + 1))


@given(ROWS)
def test_what_each_kind_of_layer_sees(rows: list[tuple[int, int]]) -> None:
    arithmetic = StepArithmetic(model_with(*KINDS), "bfloat16", None, "auto")
    starts, counts = zip(*rows, strict=True)
    load = arithmetic.load(starts, counts, len(rows))
    assert (load.num_tokens, load.num_rows) == (sum(counts), len(rows))
    for index, kind in enumerate(arithmetic.kinds):
        sees = [[seen_by(kind, start + i) for i in range(count)] for start, count in rows]
        assert load.pairs[index] == sum(len(positions) for row in sees for positions in row), kind
        assert load.kv_tokens[index] == sum(len(set().union(*row)) for row in sees), kind


@given(ROWS, ROWS)
def test_rows_add_up(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    arithmetic = StepArithmetic(model_with(*KINDS), "bfloat16", None, "auto")
    starts, counts = zip(*some, *others, strict=True)
    load = arithmetic.load(*zip(*some, strict=True), num_logits=len(some))
    for row in others:
        load = arithmetic.with_row(load, *row, num_logits=0)
    assert load == arithmetic.load(starts, counts, len(some))


def test_tokens_of_other_lanes_meet_the_experts_alone() -> None:
    """Of three experts a token uses two."""
    dense = model_with("full", "full")
    part = experts(dense.hidden_size, 30, count=3, num_active=2)
    model = replace(dense, layers=tuple(replace(layer, feed_forward=part) for layer in dense.layers))
    arithmetic = StepArithmetic(model, "bfloat16", None, "auto")
    load = arithmetic.load([4], [1], 1)
    alone, beside = (arithmetic.demand(load._replace(other_tokens=count)) for count in (0, 5))
    weights = sum(linear.num_weights for linear in part.expert.linears) // 3
    assert beside.linear_flops - alone.linear_flops == 5 * 2 * weights * 2 * len(model.layers)
    assert beside.weight_bytes == arithmetic.demand(arithmetic.load([4], [6], 1)).weight_bytes > alone.weight_bytes
    assert (beside.kv_bytes, beside.attention_flops) == (alone.kv_bytes, alone.attention_flops)
    without = StepArithmetic(dense, "bfloat16", None, "auto")
    assert without.demand(load._replace(other_tokens=5)) == without.demand(load)


def test_one_decoding_row() -> None:
    """The layers' and the output's weights twice, four operations per element of each cached key (and value)."""
    model = model_with("full", "full")
    assert model.tie_word_embeddings, "the count below takes the embeddings for the output projection"
    arithmetic = StepArithmetic(model, "bfloat16", None, "auto")
    demand = arithmetic.demand(arithmetic.load([99], [1], 1))
    q_width = sum(spec.attention.output.in_features for spec in model.layers if isinstance(spec.attention, Full))
    assert demand.attention_flops == 4 * 100 * q_width
    assert demand.flops == 2 * model.num_parameters() + demand.attention_flops
    assert demand.weight_bytes == model.weight_bytes("bfloat16")


@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_cache_dtype", "width"),
    [("float32", None, "auto", 4), ("bfloat16", "int8", "auto", 2), ("bfloat16", None, "fp8", 1)],
)
def test_bytes(dtype: str, quantization: str | None, kv_cache_dtype: str, width: int) -> None:
    """A window counts its tokens; a state is read and written whole, once per sequence."""
    model = model_with("full", "window", "state")
    arithmetic = StepArithmetic(model, dtype, quantization, kv_cache_dtype)
    demand = arithmetic.demand(arithmetic.load([99, 0], [1, 30], 2))
    spec = model.kv_specs()[0]
    token = 2 * spec.num_kv_heads * spec.head_dim_k * width
    assert token == spec.bytes_per_token(kv_format(kv_cache_dtype, dtype))
    assert demand.kv_bytes == token * (100 + 30) + token * (BOUND + 30) + 2 * 4096
    assert demand.written_bytes == 2 * token * 31 + 2 * 4096
    assert demand.weight_bytes == model.weight_bytes(dtype, quantization)


def test_without_logits_the_output_is_not_read() -> None:
    arithmetic = StepArithmetic(model_with("full"), "bfloat16", "int8", "auto")
    without, with_logits = (arithmetic.demand(arithmetic.load([0], [8], count)) for count in (0, 1))
    assert with_logits.weight_bytes - without.weight_bytes == arithmetic.output_bytes > 0
    assert with_logits.flops > without.flops


def test_integers_are_counted_apart() -> None:
    model = model_with("full")
    floats, integers = (StepArithmetic(model, "bfloat16", form, "auto") for form in (None, "int8"))
    load = floats.load([0], [8], 1)
    assert floats.demand(load).linear_int8_ops == 0
    assert floats.demand(load).flops == integers.demand(load).flops
    linears = [*(linear for layer in model.layers for linear in layer.active_linears()), model.output_linear()]
    tokens = [8] * (len(linears) - 1) + [1]
    expected = 2 * sum(linear.num_weights * count for linear, count in zip(linears, tokens, strict=True))
    assert integers.demand(load).linear_int8_ops == expected


@pytest.mark.parametrize(
    ("quantization", "num_rows", "share", "filling"),
    [
        (None, 16, 0.0, 0),
        (None, 17, 0.5, 0),
        (None, 32, 0.5, 0),
        (None, 33, 1.0, 15),
        (None, 48, 1.0, 0),
        ("int8", 17, 0.0, 0),
        ("int8", 32, 0.0, 0),
        ("int8", 50, 1.0, 14),
        ("fp8", 32, 0.0, 0),
        ("fp8", 33, 1.0, 15),
    ],
)
def test_many_rows_go_over_weights_again_on_amx(
    quantization: str | None, num_rows: int, share: float, filling: int
) -> None:
    """Prompts do so with the weights of the blocks, and decodes also with the weights of the output."""
    model = model_with("full")
    plain, tiles = (StepArithmetic(model, "bfloat16", quantization, "auto", isa) for isa in ("", "amx"))
    prompt, decodes = tiles.load([0], [num_rows], 1), tiles.load([9] * num_rows, [1] * num_rows, num_rows)
    for load in (prompt, decodes):
        demand = tiles.demand(load)
        assert demand._replace(rescanned_bytes=0, filling_ops=0) == plain.demand(load)
    blocks = 2 * model.num_block_parameters()
    output, output_bytes = 2 * model.output_linear().num_weights, tiles.output_bytes
    assert tiles.demand(prompt).rescanned_bytes == share * (plain.weight_bytes(1) - output_bytes)
    assert tiles.demand(prompt).filling_ops == filling * blocks
    assert tiles.demand(decodes).rescanned_bytes == share * plain.weight_bytes(1)
    assert tiles.demand(decodes).filling_ops == filling * (blocks + output)


@pytest.mark.parametrize("isa", ["avx2", "avx512_bf16", "neon", "neon_dotprod"])
@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
def test_more_rows_than_a_tile_go_over_weights_again_in_vectors(isa: str, quantization: str | None) -> None:
    """A tile of vector registers has six rows; two with weights in integers if there are no dot products. None are
    filled up.
    """
    most = 2 if (isa, quantization) == ("neon", "int4") else 6
    model = model_with("full")
    plain, vectors = (StepArithmetic(model, "bfloat16", quantization, "auto", each) for each in ("", isa))

    def further(num_rows: int, num_logits: int) -> float:
        load = plain.load([9] * num_rows, [1] * num_rows, num_logits)
        demand, known = vectors.demand(load), plain.demand(load)
        assert demand._replace(rescanned_bytes=0) == known
        return demand.rescanned_bytes

    weights, output = plain.weight_bytes(1), plain.output_bytes
    assert [further(count, count) for count in (1, most, most + 1, 32, 100)] == [0, 0, weights, weights, weights]
    assert further(7, 1) == weights - output
    assert [vectors.same_tiles(count) for count in (1, most, most + 1, 13)] == [most, most, sys.maxsize, sys.maxsize]
