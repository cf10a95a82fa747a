"""Drafters that are models on ranks: the tokens are the same as on one rank without drafts.

Ranks are threads here; test_sameness_ranks_lora.py has processes, with a drafter too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import demo
from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine
from quire.errors import ConfigError, ModelConfigError
from quire.kernels import cpu
from quire.models.decoder import Decoder
from quire.speculative_config import SpeculativeConfig
from tests.engine import heads
from tests.engine.harness import run
from tests.engine.heads import EAGLE3, eagle3_tensors
from tests.engine.ranks import fail_at, started
from tests.engine.test_sameness import brief
from tests.models.test_transformers_backend import ARCHITECTURES, checkpoint

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")


def speculation(method: Any, model: Path | None, **more: Any) -> dict[str, Any]:
    """Arguments of an engine."""
    name = None if model is None else str(model)
    config = SpeculativeConfig(method=method, model=name, num_speculative_tokens=3, adaptive=False, **more)
    return {"speculative_config": config}


@cache
def of_one() -> list[list[int]]:
    """Tokens of the brief prompts from one rank, without drafts."""
    return run(started(1).core, brief())


def drafted(engine: StartedEngine) -> tuple[list[list[int]], int, int]:
    """Tokens of the brief prompts, and how many drafts were made and held."""
    drafts, held = [], []

    def note(core: EngineCore, step: int) -> None:
        if core.last_record is not None:
            drafts.append(core.last_record.num_draft_tokens)
            held.append(core.last_record.num_accepted_tokens)

    tokens = run(engine.core, brief(), before_step=note)
    return tokens, sum(drafts), sum(held)


@pytest.mark.parametrize(
    ("num_ranks", "more"),
    [(2, {}), (3, {"draft_tensor_parallel_size": 1}), (4, {"draft_sample_method": "greedy"})],
)
def test_a_draft_model(num_ranks: int, more: dict[str, Any]) -> None:
    """Shared by the ranks; or each has all of it, as it is where it has too few heads."""
    folder = demo.path("draft")
    arguments = speculation("draft_model", folder, **more)
    if num_ranks == 4:
        arguments["async_scheduling"] = True
    greedily = {key: value for key, value in more.items() if key == "draft_sample_method"}
    one = started(1, drafter_folder=folder, **arguments | speculation("draft_model", folder, **greedily))
    several = started(num_ranks, drafter_folder=folder, **arguments)
    found, wanted = drafted(several), drafted(one)
    assert found[0] == wanted[0] == of_one()
    assert wanted[2] > 5
    assert found[2] > 5, "the drafts hold as with one rank"
    several.core.shutdown()


def test_a_draft_model_for_modelling_code() -> None:
    """Our own code runs the draft model, and ranks share it."""
    folder, code = demo.path("draft"), {"model_impl": "transformers"}
    arguments = code | speculation("draft_model", folder)
    engine = started(2, drafter_folder=folder, **arguments)
    assert all(isinstance(worker.drafter, Decoder) for worker in engine.executor.workers)  # type: ignore[attr-defined]
    found = drafted(engine)
    assert found == drafted(started(1, drafter_folder=folder, **arguments))
    assert found[0] == run(started(1, **code).core, brief())
    assert found[2] > 5
    engine.core.shutdown()


def test_a_draft_model_that_only_modelling_code_runs_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, *ARCHITECTURES["gpt_neox"])
    with pytest.raises(ModelConfigError, match="GPTNeoXForCausalLM"):
        started(2, drafter_folder=tmp_path, **speculation("draft_model", tmp_path))


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_heads(method: str, tmp_path: Path) -> None:
    """They read the embeddings that ranks share, and give logits by the output that ranks share, or by their own."""
    if method == "mtp":
        target = drafter = heads.write_mimo(tmp_path)
        arguments = speculation("mtp", None)
    else:
        target, drafter = demo.path("target"), heads.write(tmp_path, EAGLE3, eagle3_tensors())
        arguments = speculation("eagle3", drafter)
    one, several = (started(size, target, drafter_folder=drafter, **arguments) for size in (1, 2))
    wanted, found = drafted(one), drafted(several)
    assert found[0] == wanted[0] == run(started(1, target).core, brief())
    assert min(found[1], wanted[1]) > 5
    several.core.shutdown()


def test_an_error_of_the_drafter_ends_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank, between two passes of all: the step is computed again."""
    folder = demo.path("draft")
    engine = started(2, drafter_folder=folder, **speculation("draft_model", folder))
    drafter = engine.executor.workers[1].runner.drafting.drafter  # type: ignore[attr-defined]
    calls = fail_at(monkeypatch, drafter, "_draft_one", 2, OSError("once"))
    assert drafted(engine)[0] == of_one()
    assert len(calls) > 2
    engine.core.shutdown()


def test_a_degree_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks for the drafter.*Got 3. Expected 1, or tensor_parallel_size = 2"):
        started(2, **speculation("draft_model", demo.path("draft"), draft_tensor_parallel_size=3))
