"""Exchanges of ranks: counted by the layout, and their time by the links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.cost.arithmetic import StepArithmetic
from quire.cost.calibrate import Fit
from quire.cost.collectives import (
    LOGIT_BYTES,
    NO_EXCHANGES,
    NO_LINKS,
    TOLD_BYTES,
    Exchanges,
    Link,
    Links,
    exchanges,
    slowest,
)
from quire.cost.model import CostModel
from quire.distributed.layout import Grid
from quire.model_config import ModelConfig, load_model_config
from tests.cost.models import CONSTANTS
from tests.real_models import write_config

LAYERS, D, V, HEADS, MLP = 28, 1024, 151_936, 16 * 128, 3072  # of Qwen3-0.6B
BYTES = 2


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return load_model_config(write_config(tmp_path, "Qwen3-0.6B"))


def of(model: ModelConfig, grid: Grid, *, whole: bool = False) -> Exchanges:
    return exchanges(model, grid, "bfloat16", has_whole_experts=whole)


def columns(num_ranks: int) -> int:
    """Bytes of a token in all columns: four joins of a layer, and the rows of embeddings of each rank."""
    return BYTES * (LAYERS * (HEADS + D + MLP + D) + num_ranks * D)


def test_one_rank_exchanges_nothing(model: ModelConfig) -> None:
    assert of(model, Grid()) == NO_EXCHANGES
    assert not of(model, Grid())


def test_ranks_of_one_machine(model: ModelConfig) -> None:
    found = of(model, Grid(4))
    assert found.far.count == 0
    assert found.near.count == 4 * LAYERS + 3  # embeddings, logits, tokens
    assert found.near.token_bytes == pytest.approx(0.75 * columns(4))
    assert found.near.logit_bytes == pytest.approx(0.75 * V * LOGIT_BYTES + TOLD_BYTES)
    assert found.near.num_bytes(10, 2, 0) == pytest.approx(10 * found.near.token_bytes + 2 * found.near.logit_bytes)


def test_a_machine_gets_the_columns_of_other_machines_once(model: ModelConfig) -> None:
    """Four ranks on two machines: each machine lacks half of all columns."""
    found = of(model, Grid(4, num_nodes=2))
    assert found.near.count == 0
    assert found.far.count == 4 * LAYERS + 3
    assert found.far.token_bytes == pytest.approx(0.5 * columns(4))


def test_stages_send_the_residual_stream(model: ModelConfig) -> None:
    """Three stages have two borders. Where both sides are on other machines, each rank of the stage sends all of it."""
    alone = of(model, Grid(1, 3))
    assert (alone.near.count, alone.near.token_bytes, alone.near.logit_bytes) == (2, 2 * BYTES * D, 0)
    both = of(model, Grid(2, 2, 2))
    assert (both.far.count, both.far.token_bytes) == (1, 2 * BYTES * D)
    assert both.near == of(model, Grid(2)).near


def test_experts(tmp_path: Path) -> None:
    """Rows of experts join the inputs of each. Whole experts of four ranks send their columns of all rows."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
    config = write_config(tmp_path, "Qwen3-0.6B", architectures=["Qwen3MoeForCausalLM"], **sizes)
    model = load_model_config(config)
    attention = BYTES * (LAYERS * (HEADS + D) + 4 * D)
    rows, whole = of(model, Grid(4)), of(model, Grid(4), whole=True)
    assert rows.near.token_bytes == pytest.approx(0.75 * (attention + BYTES * LAYERS * (2 * 768 + D)))
    assert whole.near.token_bytes == pytest.approx(0.75 * (attention + BYTES * LAYERS * (2 * D / 4 + D)))
    lanes = of(model, Grid(1, num_lanes=4), whole=True).near
    assert lanes.count == 3 * LAYERS  # rows to all, columns of the rows of experts, columns of tokens
    assert lanes.token_bytes == pytest.approx(0.75 * BYTES * LAYERS * (2 * D / 4 + D))
    assert lanes.other_bytes == pytest.approx(lanes.token_bytes + BYTES * LAYERS * D)


def test_lanes_of_several_machines(tmp_path: Path) -> None:
    """Their experts are exchanged over the network. A machine gets whole rows, and rows of its own lanes not at all."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
    config = write_config(tmp_path, "Qwen3-0.6B", architectures=["Qwen3MoeForCausalLM"], **sizes)
    model = load_model_config(config)
    rows = 0.5 * BYTES * LAYERS * (2 * D + D)
    for num_lanes, share in ((2, 1), (4, 2 / 3)):
        found = of(model, Grid(1, num_lanes=num_lanes, num_nodes=2), whole=True)
        assert found.near.count == 0
        assert found.far.count == 3 * LAYERS
        assert found.far.token_bytes == pytest.approx(rows)
        assert found.far.other_bytes == pytest.approx(rows + share * BYTES * LAYERS * D)
    wide = of(model, Grid(2, num_lanes=2, num_nodes=2), whole=True)
    assert wide.far == of(model, Grid(1, num_lanes=2, num_nodes=2), whole=True).far
    assert wide.near.count == 2 * LAYERS + 3  # attention, embeddings, logits, tokens


def test_a_slower_network_makes_a_step_longer_by_its_exchanges(model: ModelConfig) -> None:
    between = of(model, Grid(2, num_nodes=2))
    arithmetic = StepArithmetic(model, "bfloat16", None, "auto", "", between)
    load = arithmetic.load([100] * 8, [1] * 8, 8)

    def seconds(link: Link) -> float:
        return CostModel(arithmetic, Fit(replace(CONSTANTS, links=Links(far=link)), 0.1)).predict(load).seconds

    fast, slow = Link(1e-5, 1e-10), Link(1e-3, 1e-8)
    num_bytes = 8 * (0.5 * columns(2) + 0.5 * V * LOGIT_BYTES + TOLD_BYTES)
    expected = (4 * LAYERS + 3) * (slow.per_exchange - fast.per_exchange) + num_bytes * (slow.per_byte - fast.per_byte)
    assert seconds(slow) - seconds(fast) == pytest.approx(expected)
    assert seconds(fast) - seconds(Link()) == pytest.approx((4 * LAYERS + 3) * 1e-5 + num_bytes * 1e-10)


def test_ranks_wait_for_the_slowest_link() -> None:
    assert slowest([]) == NO_LINKS
    one, other = Links(Link(1e-6, 3e-10)), Links(Link(2e-6, 1e-10), Link(5e-5, 1e-9))
    assert slowest([one, other]) == Links(Link(2e-6, 3e-10), Link(5e-5, 1e-9))
