"""Adapters on ranks: every rank has its rows of each delta. Tokens are the same as on one rank, to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import quire.demo
from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine
from quire.kernels import cpu
from quire.lora.adapter_config import CONFIG_NAME
from quire.messages import AdapterState, LoadAdapter
from quire.model_config import load_model_config
from tests.engine.harness import Prompt, run
from tests.engine.ranks import started
from tests.engine.test_rank_processes import in_processes, process_of
from tests.engine.test_sameness import brief
from tests.engine.test_sameness_ranks_drafters import drafted, of_one, speculation
from tests.lora.adapters import random_tensors, write_adapter
from tests.models.tiny_models import SIZES

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of the demo model: one of all linear layers, one of some and of the vocabulary."""
    return write(tmp_path_factory.mktemp("adapters"), quire.demo.path("target"))


def write(folder: Path, model: Path) -> list[Path]:
    config = load_model_config(model)
    some = ("o_proj", "up_proj", "gate_up_proj", "embed_tokens", "lm_head")
    return [
        write_adapter(folder / "all", random_tensors(config, 8, modules=ALL, size=0.2), rank=8),
        write_adapter(folder / "some", random_tensors(config, 3, modules=some, seed=1, size=0.2), rank=3),
    ]


def load(core: EngineCore, path: Path) -> AdapterState:
    assert core.adapters is not None
    core.adapters.load(LoadAdapter(path=str(path), operation=1))
    while not (states := core.adapters.take_states()):
        core.step()
    return states[0]


def tokens(engine: StartedEngine, adapters: list[Path]) -> list[list[int]]:
    """Of the brief prompts: the base and two adapters side by side."""
    facts = [load(engine.core, path).facts for path in adapters]
    digests = [None, *(each.digest for each in facts if each is not None)]
    assert len(digests) == 3
    prompts: list[Prompt] = [replace(prompt, adapter=digests[i % 3]) for i, prompt in enumerate(brief())]
    found = run(engine.core, prompts)
    assert run(engine.core, prompts[::-1], prefix="again") == found[::-1]
    return found


@pytest.fixture
def two() -> Iterator[StartedEngine]:
    """Ranks as processes, with a drafter."""
    folder = quire.demo.path("draft")
    drafting = speculation("draft_model", folder)
    engine = in_processes(drafter_folder=folder, tensor_parallel_size=2, **LORA, **drafting)
    yield engine
    process = process_of(engine)
    engine.core.shutdown()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("num_ranks", "form"),
    [(2, {}), (3, {"dtype": "float32"}), (4, {"quantization": "int4", "async_scheduling": True})],
)
def test_every_form(num_ranks: int, form: dict[str, Any], adapters: list[Path]) -> None:
    one, several = started(1, **LORA, **form), started(num_ranks, **LORA, **form)
    want = tokens(one, adapters)
    assert want != run(one.core, brief(), prefix="base"), "the adapters change nothing"
    assert tokens(several, adapters) == want
    several.core.shutdown()


@pytest.mark.parametrize(("width", "num_stages"), [(1, 2), (1, 3), (2, 2)])
def test_stages(width: int, num_stages: int, adapters: list[Path]) -> None:
    """A stage has the deltas of its layers; the vocabulary's are in the first and the last one."""
    several = started(width, num_stages=num_stages, **LORA)
    assert tokens(several, adapters) == tokens(started(1, **LORA), adapters)
    lora = several.resolved.lora
    assert lora is not None
    parts = [worker.model.config for worker in several.executor.workers]  # type: ignore[attr-defined]
    assert all(0 < lora.adapter_bytes(part) < lora.adapter_bytes(several.model_config) for part in parts)
    several.core.shutdown()


def test_an_adapter_of_one_layer(tmp_path: Path) -> None:
    """All stages but one have nothing of it, and know it by the same digest."""
    config = load_model_config(quire.demo.path("target"))
    last = f"layers.{config.num_layers - 1}.mlp.down_proj"
    path = write_adapter(tmp_path / "last", random_tensors(config, 4, modules=(last,), size=0.5), rank=4)
    prompts = [*brief()]
    answers = []
    for engine in (started(1, **LORA), started(1, num_stages=3, **LORA)):
        facts = load(engine.core, path).facts
        assert facts is not None
        adapted = run(engine.core, [replace(prompt, adapter=facts.digest) for prompt in prompts])
        answers.append((facts, adapted, run(engine.core, prompts, prefix="base")))
        engine.core.shutdown()
    assert answers[0] == answers[1]
    assert answers[0][1] != answers[0][2], "the adapter changes nothing"


def test_stages_as_processes(adapters: list[Path], tmp_path: Path) -> None:
    """Adapters come, go and are refused while steps are in flight in both stages."""
    engine = in_processes(pipeline_parallel_size=2, **LORA)
    state = load(engine.core, tmp_path)
    assert state.error is not None
    assert f"no {CONFIG_NAME}" in state.error
    assert tokens(engine, adapters) == tokens(started(1, **LORA), adapters)
    process = process_of(engine)
    engine.core.shutdown()
    assert process.returncode == 0


def test_fused_tensors(tmp_path: Path) -> None:
    """A delta of one tensor gives several strips of a rank's weight."""
    sizes = SIZES | {"vocab_size": 5000, "intermediate_size": 200}
    config = transformers.Phi3Config(**sizes).to_dict() | {"architectures": ["Phi3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    adapters, more = write(tmp_path / "adapters", tmp_path), {"load_format": "dummy", "max_model_len": 128}
    engines = [started(num_ranks, tmp_path, **LORA, **more) for num_ranks in (1, 2)]
    one, several = (tokens(engine, adapters) for engine in engines)
    assert one == several
    engines[1].core.shutdown()


def test_processes(two: StartedEngine, adapters: list[Path], tmp_path: Path) -> None:
    """An adapter that one of them cannot read is refused by all, and the next one is read."""
    state = load(two.core, tmp_path)
    assert state.error is not None
    assert f"no {CONFIG_NAME}" in state.error
    assert tokens(two, adapters) == tokens(started(1, **LORA), adapters)
    of_base, num_drafts, num_held = drafted(two)
    assert of_base == of_one()
    assert 0 < num_held < num_drafts


def test_an_adapter_that_is_read_twice_before_another(adapters: list[Path], tmp_path: Path) -> None:
    """All three are read before the first one is added. Every rank has both adapters then."""
    one, two = started(1, **LORA), in_processes(tensor_parallel_size=2, **LORA)
    again = shutil.copytree(adapters[0], tmp_path / "again")
    core = two.core
    assert core.adapters is not None
    for path in (adapters[0], again, adapters[1]):
        core.adapters.load(LoadAdapter(path=str(path), operation=1))
    core.step()
    for read in core.adapters._reads:
        for load_of_rank in read.loading._loads:  # type: ignore[attr-defined]
            load_of_rank.result()
    core.step()
    states = core.adapters.take_states()
    assert [state.error for state in states] == [None] * 3
    digests = [state.facts.digest for state in states if state.facts is not None]
    assert digests[0] == digests[1] != digests[2]
    prompts = [replace(prompt, adapter=digests[1 + i % 2]) for i, prompt in enumerate(brief())]
    for path in adapters:
        load(one.core, path)
    assert run(core, prompts) == run(one.core, prompts)
    core.shutdown()


def test_ranks_that_read_different_files(adapters: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes them meanwhile."""
    engine = started(2, **LORA)
    second = engine.executor.workers[1]  # type: ignore[attr-defined]
    read = second.load_adapter
    monkeypatch.setattr(second, "load_adapter", lambda path, *others: read(str(adapters[1]), *others))
    state = load(engine.core, adapters[0])
    assert state.error is not None
    assert "changed while the ranks read them" in state.error
    monkeypatch.undo()
    assert load(engine.core, adapters[0]).error is None
    engine.core.shutdown()
