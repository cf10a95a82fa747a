"""The rows of linear layers that each of several ranks holds: all of them once, heads, words and blocks whole."""

from __future__ import annotations

from typing import Any

import pytest

import quire.demo
from quire.distributed.layout import head_shares, place_experts, shares
from quire.formats.stored_linear import StoredLinear, held_form, row_unit
from quire.formats.weight_format import GGUF, PANEL_WIDTH
from quire.gguf.types import TYPES
from quire.hf_config.layer_format import LayerFormat
from quire.layer_spec.attention import Full
from quire.layer_spec.feed_forward import Dense
from quire.layer_spec.shapes import LinearShape
from quire.model_config import ModelConfig, load_model_config
from quire.planning.cut_model import ModelCut

PHI3 = {"architectures": ["Phi3ForCausalLM"]}  # one tensor for q, k and v, and one for gate and up
ORDERED = LayerFormat(layout="gptq", bits=4, scales="group", group_size=64, has_zeros=True, has_order=True)
AWQ = LayerFormat(layout="awq", bits=4, scales="group", group_size=128, has_zeros=True)
FP8 = LayerFormat(layout="fp8", bits=8, scales="block", block=(128, 128))


def parts_of(overrides: dict[str, Any], num_ranks: int) -> list[ModelConfig]:
    cut = ModelCut(load_model_config(quire.demo.path(), overrides), num_ranks)
    return [cut.part(rank) for rank in range(num_ranks)]


def rows_of(shape: LinearShape) -> list[tuple[str, range]]:
    assert shape.share is not None
    return [(name, shape.share.own_rows(index)) for index, (name, _) in enumerate(shape.shards)]


def test_ranges_lie_side_by_side_and_differ_by_one_unit() -> None:
    for size, num_ranks, unit in ((29_568, 2, 64), (100, 3, 1), (130, 3, 64), (7, 7, 1), (128, 1, 8)):
        ranges = shares(size, num_ranks, unit)
        assert [row for each in ranges for row in each] == [*range(size)]
        assert max(map(len, ranges)) - min(map(len, ranges)) <= unit
        assert len(ranges[0]) == max(map(len, ranges))
        assert not any(each.start % unit for each in ranges)
    assert [len(each) for each in shares(130, 4, 64)] == [64, 64, 2, 0]


@pytest.mark.parametrize("num_ranks", range(1, 15))
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(14, 2), (32, 8), (8, 8), (12, 1)])
def test_each_head_reads_its_own_keys(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Every head of q has one rank, and that rank has the head of k that it reads, and no others."""
    found = head_shares(num_q_heads, num_kv_heads, num_ranks)
    assert [head for own, _ in found for head in own] == [*range(num_q_heads)]
    for own, keys in found:
        assert {head // (num_q_heads // num_kv_heads) for head in own} == (set(keys) if own else set())
    assert len(found[0][0]) == max(len(own) for own, _ in found)


@pytest.mark.parametrize("overrides", [{}, PHI3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_parts_of_a_model(overrides: dict[str, Any], num_ranks: int) -> None:
    """Four heads of q, two of k and v, of 64: the demo model. gate and up are cut where down's inputs are."""
    parts = parts_of(overrides, num_ranks)
    seen: dict[str, list[int]] = {}
    for part in parts:
        attention, mlp = part.layers[0].attention, part.layers[0].feed_forward
        assert isinstance(attention, Full)
        assert isinstance(mlp, Dense)
        for shape in (attention.output, mlp.gate_up, mlp.down, part.output_linear()):
            for name, rows in rows_of(shape):
                seen.setdefault(name, []).extend(rows)
        (_, queries), (_, keys), (_, values) = rows_of(attention.qkv)
        assert len(queries) == attention.num_q_heads * 64
        assert len(keys) == len(values) == attention.num_kv_heads * 64
        assert mlp.gate_up.out_features == 2 * mlp.down.share.inputs[part.vocab_share.rank]
        assert mlp.down.in_features == sum(mlp.down.share.inputs) == 768
        assert attention.output.in_features == sum(attention.output.share.inputs) == 256
    for name, rows in seen.items():
        assert sorted(rows) == [*range(len(rows))], name


def test_a_fused_tensor_gives_strips() -> None:
    attention = parts_of(PHI3, 2)[1].layers[0].attention
    assert isinstance(attention, Full)
    assert rows_of(attention.qkv) == [
        ("qkv_proj", range(128, 256)),
        ("qkv_proj", range(320, 384)),
        ("qkv_proj", range(448, 512)),
    ]
    assert attention.qkv.whole().shards == (("qkv_proj", 512),)


def test_key_heads_that_are_fewer_than_the_ranks_are_repeated() -> None:
    keys = [rows_of(part.layers[0].attention.qkv)[1][1] for part in parts_of({}, 4)]  # type: ignore[union-attr]
    assert keys == [range(64)] * 2 + [range(64, 128)] * 2


@pytest.mark.parametrize(
    ("form", "unit"),
    [
        ({}, 1),
        ({"source": TYPES[12], "held": GGUF["Q4_K"]}, 1),
        ({"source": AWQ, "held": held_form(AWQ, 768)}, 8),
        ({"source": ORDERED, "held": held_form(ORDERED, 768)}, 8),
        ({"source": FP8, "held": held_form(FP8, 768)}, 128),
    ],
)
def test_what_a_form_keeps_together(form: dict[str, Any], unit: int) -> None:
    """Words that hold several codes, and blocks. Groups and blocks along the inputs are never cut."""
    shape = LinearShape(prefix="", shards=(("w", 768),), in_features=768)
    assert row_unit(StoredLinear(**{"shape": shape, "source": None, "held": None, "reason": "a test", **form})) == unit


def test_pieces_are_whole_panels_where_there_are_enough() -> None:
    for part in parts_of({}, 3)[:-1]:
        for name, rows in rows_of(part.layers[0].feed_forward.gate_up):  # type: ignore[union-attr]
            assert len(rows) % PANEL_WIDTH == 0, name


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "strategy", "num_redundant", "expected"),
    [
        (5, 2, "linear", 0, ((0, 1, 2), (3, 4))),
        (5, 2, "round_robin", 0, ((0, 2, 4), (1, 3))),
        (4, 3, "linear", 4, ((0, 1, 2), (3, 0, 1), (2, 3))),
    ],
)
def test_ranks_have_whole_experts(
    num_experts: int, num_ranks: int, strategy: str, num_redundant: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert place_experts(num_experts, num_ranks, strategy, num_redundant) == expected
