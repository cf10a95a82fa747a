"""A worker with adapters: it reads them while steps go on, and its memory for them is the planned one."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import quire.demo
from quire import LLM, SamplingParams
from quire.errors import AdapterChangedError, AdapterError
from quire.lora.request import LoRARequest
from quire.model_config import load_model_config
from quire.models.decoder import Decoder
from quire.schedule import ScheduledBatch
from quire.settings import ADAPTER_READ_BYTES, LoraSettings
from quire.worker.adapters import WorkerAdapters
from quire.worker.model_runner import PendingStep
from tests.loading import load_model
from tests.lora.adapters import write_random_adapter
from tests.lora.whole_adapters import read_adapter

SETTINGS = LoraSettings(max_loras=1, max_rank=8, max_cpu_loras=2, dtype="bfloat16")
QUESTION = "What does os.path.join do?"


def demo_model() -> Decoder:
    model = load_model(load_model_config(quire.demo.path("target")), torch.bfloat16)
    assert isinstance(model, Decoder)
    return model


def test_planned_bytes_are_those_of_the_largest_adapters(tmp_path: Path) -> None:
    model = demo_model()
    modules = ("_proj", "embed_tokens", "lm_head")
    folder = write_random_adapter(tmp_path / "largest", model.config, SETTINGS.max_rank, modules=modules)
    adapters = WorkerAdapters(model, SETTINGS)
    load = adapters.load(str(folder), None, is_awaited=False)
    facts = load.result()
    assert dict(adapters.slots) == {}, "steps have it when it was added"
    load.add()
    load.add()
    assert list(adapters.slots) == [facts.digest]
    tables = [place.layer.lora for place in model.adaptable()]
    deltas = [delta for table in tables if table is not None for slot in table.deltas for delta in slot]
    held = [delta for delta in deltas if delta is not None]
    num_bytes = sum(delta.nbytes for delta in held) + 300 * len(held)
    assert SETTINGS.adapter_bytes(model.config) == num_bytes
    assert SETTINGS.num_bytes(model.config) == num_bytes * (SETTINGS.max_cpu_loras + 1) + ADAPTER_READ_BYTES
    assert len({delta.memory.data_ptr() for delta in held}) == 1, "one piece, which the system gets back"
    few, num_layers = replace(SETTINGS, target_modules=("q_proj",)), len(model.config.layers)
    assert few.adapter_bytes(model.config) == (8 * 2 * 2 * model.config.hidden_size + 300) * num_layers
    assert replace(SETTINGS, max_rank=10**6).num_bytes(model.config) > 3 * 10**6 * 4 * model.config.vocab_size
    adapters.drop(facts.digest)
    assert all(table.is_empty for table in tables if table is not None)


def test_no_memory_is_not_taken_for_a_bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = demo_model()
    folder = write_random_adapter(tmp_path / "good", model.config, SETTINGS.max_rank, modules=("q_proj",))
    adapters = WorkerAdapters(model, SETTINGS)

    def refused(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("quire.kernels.lora.mmap.mmap", refused)
        with pytest.raises(MemoryError):
            adapters.load(str(folder), None, is_awaited=False).result()
    adapters.load(str(folder), None, is_awaited=False).result()


def test_an_adapter_that_is_refused_takes_no_slot(tmp_path: Path) -> None:
    adapters = WorkerAdapters(demo_model(), replace(SETTINGS, max_rank=1))
    with pytest.raises(AdapterError, match="rank"):
        adapters.load(str(quire.demo.path("lora")), None, is_awaited=False).result()
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        adapters.load(str(tmp_path), None, is_awaited=False).result()
    with pytest.raises(AdapterChangedError):
        adapters.load(str(quire.demo.path("lora")), "another content", is_awaited=False).result()
    assert dict(adapters.slots) == {}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_demo_adapter_answers_in_json(async_scheduling: bool) -> None:
    """Beside the base, whose tokens stay the same as without adapters."""
    params = SamplingParams(temperature=0, max_tokens=80)
    arguments = {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 26}
    model = str(quire.demo.path("target"))
    question = {"role": "user", "content": QUESTION}
    (plain,) = LLM(model, **arguments).chat([question], params)
    llm = LLM(model, enable_lora=True, async_scheduling=async_scheduling, **arguments)
    request = LoRARequest("json", 1, str(quire.demo.path("lora")))
    adapted, base = llm.chat([[question], [question]], params, lora_request=[request, None])
    assert base.outputs[0].token_ids == plain.outputs[0].token_ids
    assert isinstance(json.loads(adapted.outputs[0].text), dict)


def test_a_load_beside_steps_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker tells the loader's thread when it computes a step."""
    llm = LLM(enable_lora=True, max_model_len=256, max_num_seqs=2, kv_cache_memory_bytes=1 << 24)
    worker = llm.llm_engine.core.executor.workers[0]  # type: ignore[attr-defined]
    folder = write_random_adapter(tmp_path, worker.model.config, 8)
    rests: list[float] = []
    monkeypatch.setattr(worker.adapters._loader, "_rest", rests.append)
    worker.adapters.load(str(folder), None, is_awaited=False).result()
    assert not rests
    submit = worker.runner.submit

    def load_meanwhile(batch: ScheduledBatch) -> PendingStep:
        worker.adapters.load(str(folder), None, is_awaited=False).result()
        return submit(batch)

    monkeypatch.setattr(worker.runner, "submit", load_meanwhile)
    llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
    assert rests


def test_a_load_that_was_interrupted_gives_nobody_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next load gets its own adapter, and the interrupted one's adapter is dropped."""
    arguments = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 24}
    llm = LLM(enable_lora=True, **arguments)
    model = load_model_config(quire.demo.path("target"))
    folders = [write_random_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate("ab")]
    load = partial(llm.generate, "x", SamplingParams(max_tokens=1), use_tqdm=False)
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.llm_engine.runner), "_step", lambda runner: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load(lora_request=LoRARequest("a", 1, str(folders[0])))
    load(lora_request=LoRARequest("b", 2, str(folders[1])))
    registry = llm.llm_engine.core.adapters
    assert registry is not None
    expected = read_adapter(folders[1], model, max_rank=16, dtype=torch.bfloat16).facts.digest
    assert expected in registry
    load()
    assert registry.num_known == 1
