"""Patterns of an adapter's config choose ranks and factors as in PEFT, and a hostile one takes no time."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.errors import AdapterError
from quire.lora.adapter_config import AdapterConfig, parse_config
from quire.lora.patterns import Pattern, Steps


def config(**fields: Any) -> AdapterConfig:
    return parse_config(json.dumps({"peft_type": "LORA"} | fields).encode())


def test_ranks_and_factors_follow_their_patterns() -> None:
    ranks = {"model.layers.1.self_attn.q_proj": 2, "q_proj": 3, r"^model\.layers\.\d+\.mlp\.(up|gate)_proj": 5}
    alphas = {"layers.0.mlp.down_proj": 1, ".*[vk]_proj": 16, "proj": 100, "self_attn.o_proj": 12}
    both = config(r=4, lora_alpha=8, rank_pattern=ranks, alpha_pattern=alphas)
    assert [both.rank_of(f"model.layers.{i}.self_attn.q_proj") for i in range(3)] == [3, 2, 3]
    assert both.rank_of("model.layers.11.mlp.gate_proj") == 5
    assert both.rank_of("x.model.layers.11.mlp.gate_proj") == 4
    assert both.scale_of("model.layers.0.mlp.down_proj") == 1 / 4
    assert both.scale_of("model.layers.10.mlp.down_proj") == 8 / 4
    assert both.scale_of("model.layers.10.self_attn.k_proj") == 16 / 4
    assert both.scale_of("model.layers.3.self_attn.o_proj") == 12 / 4
    assert config(r=4, lora_alpha=6, use_rslora=True).scale_of("q_proj") == 3.0


@pytest.mark.parametrize(
    "source",
    [
        *("q_proj", "^q_proj", "proj", ".*proj", ".*", "", "a*b", "(a|aa)+b", "a?a?b", "[^q]*_proj", "lm_hea.$"),
        *(r".*\.(q|k|v|o)_proj", r"(?:model\.)?layers\.[0-9]+\.mlp\.down_proj", "(^model.*|lm_head)", "(a*)*b"),
        *("x|y|lm_head", r"[\w.]+_attn\.\w+", "a+?b", "(|a)b", r"layers\.\d+\..*", "model.layers", "^model.*q_proj"),
    ],
)
def test_patterns_mean_what_python_makes_of_them(source: str) -> None:
    for name in (
        "q_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.12.mlp.down_proj",
        "lm_head",
        "aab",
        "b.aab",
    ):
        expected = re.match(rf"(.*\.)?({source})$", name) is not None
        assert Pattern(source, Steps()).ends(name) is expected, name


@pytest.mark.parametrize(
    "source",
    [
        *("(", ")", "a)", "a**", "*", "a{2}", "(?=a)", r"(a)\1", r"\bq", "[a", "[z-a]", "\\", "(?P<x>a)"),
        *("(" * 99 + ")" * 99, "a" * 9999),
    ],
)
def test_other_patterns_are_refused(source: str) -> None:
    with pytest.raises(AdapterError, match="pattern that is not read"):
        config(alpha_pattern={source: 2})


@pytest.mark.parametrize(
    ("source", "is_too_long"),
    [
        ("(a+)+b", False),
        ("(((a*)*)*)*b", False),
        ("((a|aa|aaa)*)*b", False),
        ("(a|a)*" * 40 + "b", False),
        (".*" * 900 + "b", True),
    ],
)
def test_a_hostile_pattern_ends(source: str, is_too_long: bool) -> None:
    """Python's own module would need years for the first on such a name."""
    hostile = config(lora_alpha=8, alpha_pattern={source: 2})

    def ask() -> list[float]:
        return [hostile.scale_of("a" * 100) for _ in range(100)]

    if is_too_long:
        with pytest.raises(AdapterError, match="too long"):
            ask()
    else:
        assert set(ask()) == {1.0}
