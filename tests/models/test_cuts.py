"""How several devices may share the linear layers: what each computes adds up to the whole, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import quire.demo
from quire.errors import ModelConfigError
from quire.formats.stored_linear import StoredLinear, held_form, legal_cuts
from quire.formats.weight_format import GGUF, PANEL_WIDTH, GroupedFormat
from quire.gguf.types import TYPES
from quire.hf_config.layer_format import LayerFormat
from quire.layer_spec import Cut, Dense, Full, LinearShape
from quire.model_config import load_model_config

PHI3 = {"architectures": ["Phi3ForCausalLM"]}  # one tensor for q, k and v, and one for gate and up


def stored(shape: LinearShape, **form: Any) -> StoredLinear:
    return StoredLinear(**{"shape": shape, "source": None, "held": None, "reason": "a test", **form})


def rows_of(shape: LinearShape, num_parts: int) -> list[list[int]]:
    return [[row for part in piece.ranges for row in part] for piece in legal_cuts(stored(shape), num_parts)]


def attention_of(overrides: dict[str, Any]) -> Full:
    attention = load_model_config(quire.demo.path(), overrides).layers[0].attention
    assert isinstance(attention, Full)
    return attention


def mlp_of(overrides: dict[str, Any]) -> Dense:
    mlp = load_model_config(quire.demo.path(), overrides).layers[0].feed_forward
    assert isinstance(mlp, Dense)
    return mlp


@pytest.mark.parametrize("overrides", [{}, PHI3])
def test_the_parts_of_an_mlp_add_up(overrides: dict[str, Any]) -> None:
    """gate_up is cut where down is, also where gate and up are one tensor."""
    mlp = mlp_of(overrides)
    inner, hidden = mlp.down.in_features, mlp.down.out_features
    draw = torch.Generator().manual_seed(0)
    gate_up_NK, down_NK = (
        torch.randn(shape.out_features, shape.in_features, generator=draw, dtype=torch.float64)
        for shape in (mlp.gate_up, mlp.down)
    )
    x_K = torch.randn(hidden, generator=draw, dtype=torch.float64)

    def run(gate_up_NK: torch.Tensor, down_NK: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up_NK @ x_K).chunk(2)
        return down_NK @ (gate.sigmoid() * up)

    columns = rows_of(mlp.down, 3)
    parts = [
        run(gate_up_NK[rows], down_NK[:, part]) for rows, part in zip(rows_of(mlp.gate_up, 3), columns, strict=True)
    ]
    assert [len(part) for part in columns] == [inner // 3] * 3
    torch.testing.assert_close(sum(parts), run(gate_up_NK, down_NK))


@pytest.mark.parametrize("overrides", [{}, PHI3])
def test_heads_stay_whole(overrides: dict[str, Any]) -> None:
    """Four heads of q, two of k and v, of 64: the demo model."""
    first, second = rows_of(attention_of(overrides).qkv, 2)
    assert first == [*range(128), *range(256, 320), *range(384, 448)]
    assert second == [*range(128, 256), *range(320, 384), *range(448, 512)]
    with pytest.raises(ModelConfigError, match="cut in 3"):
        rows_of(attention_of(overrides).output, 3)


def test_key_heads_that_are_fewer_than_the_parts_are_repeated() -> None:
    attention = attention_of({})
    parts = rows_of(attention.qkv, 4)
    keys = [[row for row in part if 256 <= row < 384] for part in parts]
    assert keys == [[*range(256, 320)]] * 2 + [[*range(320, 384)]] * 2
    assert [part[0] for part in parts] == [0, 64, 128, 192], "every part has a head of q of its own"
    pieces = legal_cuts(stored(attention.qkv), 4)
    assert [piece.stored.shape.shards for piece in pieces] == [(("q_proj", 64), ("k_proj", 64), ("v_proj", 64))] * 4
    with pytest.raises(ModelConfigError, match="cut in 8"):
        rows_of(attention.output, 8)


ORDERED = LayerFormat(layout="gptq", bits=4, scales="group", group_size=64, has_zeros=True, has_order=True)
AWQ = LayerFormat(layout="awq", bits=4, scales="group", group_size=128, has_zeros=True)
FP8 = LayerFormat(layout="fp8", bits=8, scales="block", block=(128, 128))


@pytest.mark.parametrize(
    ("by", "form", "legal", "illegal"),
    [
        ("columns", {"held": GroupedFormat(4, 128)}, [2, 3, 6], {4: "a multiple of 128", 5: "a divisor"}),
        ("columns", {"held": GroupedFormat(8, None)}, [2, 4, 8], {7: "a divisor"}),
        ("columns", {"source": TYPES[12], "held": GGUF["Q4_K"]}, [3], {2: "a multiple of 256"}),
        ("columns", {"source": TYPES[8], "held": GGUF["Q8_0"]}, [2, 3, 8], {16: "a multiple of 32"}),
        ("columns", {"source": AWQ, "held": held_form(AWQ, 768)}, [2, 3], {4: "a multiple of 128"}),
        ("columns", {"source": ORDERED, "held": held_form(ORDERED, 768)}, [], {2: "without act-order"}),
        ("columns", {"source": FP8, "held": held_form(FP8, 768)}, [2, 6], {4: "a multiple of 128"}),
        ("rows", {"held": GroupedFormat(4, 128)}, [2, 4, 768], {5: "a divisor"}),
        ("rows", {"source": TYPES[12], "held": GGUF["Q4_K"]}, [2, 768], {}),
        ("rows", {"source": AWQ, "held": held_form(AWQ, 768)}, [2, 96], {192: "a multiple of 8"}),
        ("rows", {"source": ORDERED, "held": held_form(ORDERED, 768)}, [2, 96], {192: "a multiple of 8"}),
        ("rows", {"source": FP8, "held": held_form(FP8, 768)}, [2, 3], {4: "a multiple of 128"}),
    ],
)
def test_what_a_form_keeps_together(by: Any, form: dict[str, Any], legal: list[int], illegal: dict[int, str]) -> None:
    """Groups, blocks of GGUF, super-groups and words that hold several codes."""
    linear = stored(LinearShape(prefix="", shards=(("w", 768),), in_features=768, cut=Cut(by)), **form)
    for num_parts in legal:
        pieces = legal_cuts(linear, num_parts)
        assert [number for piece in pieces for part in piece.ranges for number in part] == [*range(768)]
    for num_parts, expected in illegal.items():
        with pytest.raises(ModelConfigError, match=expected):
            legal_cuts(linear, num_parts)


@pytest.mark.parametrize("held", [None, GroupedFormat(4, 128)])
def test_pieces_have_panels_of_their_own(held: GroupedFormat | None) -> None:
    """Whole panels cost nothing more; others are padded on every device."""
    for N, is_padded in ((8 * PANEL_WIDTH, False), (6 * PANEL_WIDTH, True)):
        whole = stored(LinearShape(prefix="", shards=(("w", N),), in_features=256, cut=Cut("rows")), held=held)
        pieces = legal_cuts(whole, 4)
        num_bytes = sum(piece.stored.num_bytes("bfloat16") for piece in pieces)
        assert (num_bytes > whole.num_bytes("bfloat16")) == is_padded
        assert num_bytes == 4 * replace(whole, shape=pieces[0].stored.shape).num_bytes("bfloat16")


@pytest.mark.parametrize("by", ["none", "experts"])
def test_what_is_not_cut_is_held_whole(by: Any) -> None:
    linear = stored(LinearShape(prefix="", shards=(("router", 8),), in_features=5, cut=Cut(by)))
    assert [piece.stored for piece in legal_cuts(linear, 3)] == [linear] * 3
