"""A start with a draft model: it loads, plans and serves, and refuses models that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire import demo
from quire.config import EngineConfig
from quire.drafter_settings import drafter_settings
from quire.engine.bring_up import bring_up
from quire.engine.core import EngineCore
from quire.engine.start import start_engine
from quire.entry.launch import find_model, open_model
from quire.errors import ConfigError, QuireError
from quire.formats.kv_format import kv_format
from quire.forward_batch import ForwardBatch
from quire.frontend.tokenizer import Tokenizer, check_same_vocabulary
from quire.layer_spec.attention import Full, Window
from quire.layer_spec.layer import LayerSpec
from quire.life_cycle import Worker, WorkerSettings
from quire.messages import Progress
from quire.model_config import ModelConfig, load_model_config
from quire.planning.memory_plan import KvPages, logits_bytes, planned_weight_bytes
from quire.resolve import resolve
from quire.sampling_params import SamplingParams
from quire.scheduler.from_settings import scheduler_of
from quire.speculative_config import SpeculativeConfig
from quire.worker import worker as worker_module
from quire.worker.draft_model import DraftModel
from quire.worker.worker import DeviceWorker
from tests.cost.models import cost_model
from tests.engine.harness import Prompt, demo_draft, demo_model, run
from tests.engine.test_drafts import RANDOM
from tests.engine.test_life_cycle import FACTS
from tests.worker.fake_accelerator import FakeAccelerator
from tests.worker.test_gpu_memory import GpuWorker

TARGET, DRAFT = load_model_config(demo.path("target")), load_model_config(demo.path("draft"))
WITH_DRAFT = replace(TARGET, drafter=DRAFT)
PROMPTS = [
    Prompt(
        (5 + index, 7, 9, 11),
        SamplingParams(min_tokens=20, max_tokens=20, **(RANDOM | {"temperature": 0.7 * (index % 2)})),
    )
    for index in range(4)
]


def ignore(phase: str, share: float, detail: str) -> None: ...


def config_with(**options: Any) -> EngineConfig:
    speculation = SpeculativeConfig(
        method="draft_model", model=DRAFT.model, num_speculative_tokens=4, **{"adaptive": False, **options}
    )
    limits: dict[str, Any] = {"max_num_seqs": 24, "max_num_batched_tokens": 96, "max_model_len": 256}
    return EngineConfig.from_kwargs(speculative_config=speculation, num_threads=1, **limits)


def drafted(core: EngineCore) -> tuple[list[list[int]], int]:
    """The tokens of the prompts, and how many drafts were verified."""
    drafts = []

    def note(core: EngineCore, step: int) -> None:
        if core.last_record is not None:
            drafts.append(core.last_record.num_draft_tokens)

    return run(core, PROMPTS, before_step=note), sum(drafts)


@cache
def plain_tokens() -> list[list[int]]:
    """Without drafts."""
    config = replace(config_with(), speculative_config=None, device="cpu")
    return drafted(start_engine(config, demo.path("target"), is_server=True, progress=ignore).core)[0]


def test_the_plan_is_what_is_allocated_and_it_serves() -> None:
    workers: list[DeviceWorker] = []

    def make(model_config: ModelConfig, progress: Progress) -> Sequence[Worker]:
        workers.append(DeviceWorker(model_config, progress))
        return workers

    config = replace(config_with(), device="cpu", num_gpu_blocks_override=100)
    without = replace(config, speculative_config=None)
    folders = {"model_folder": demo.path("target"), "is_server": True, "progress": ignore}
    plain, loaded = start_engine(without, **folders), list[float]()
    folders["progress"] = lambda phase, share, detail: loaded.append(share) if phase == "load" else None
    engine = start_engine(config, **folders, make_workers=make, drafter_folder=demo.path("draft"))
    assert loaded == sorted(loaded), "the bar goes back"
    expected, none = drafted(plain.core)
    tokens, num_drafts = drafted(engine.core)
    assert tokens == expected
    assert none == 0
    assert num_drafts > 20
    (worker,) = workers
    assert worker.drafter is not None
    assert isinstance(worker.runner.drafting.drafter, DraftModel)
    resolved, settings = engine.resolved, engine.resolved.settings
    assert worker.cache.num_bytes == resolved.memory.kv_cache_bytes
    kv = kv_format("auto", "bfloat16")
    assert settings["drafter_kv_bytes_per_token"].value == DRAFT.kv_bytes_per_token(kv)
    both = DRAFT.kv_bytes_per_token(kv) + TARGET.kv_bytes_per_token(kv)
    assert resolved.memory.kv_cache_bytes == 100 * resolved.model.block_size * both
    tensors = [tensor for layer in worker.cache.layers + worker.cache.drafter_layers for tensor in layer.tensors()]
    assert sum(tensor.nbytes for tensor in tensors) == worker.cache.num_bytes
    assert settings["drafter_weight_bytes"].value == worker.drafter.weight_bytes()
    own = worker.model.weight_bytes() + worker.drafter.weight_bytes()
    assert resolved.memory.weight_bytes == own == planned_weight_bytes(resolved, WITH_DRAFT)
    logits = settings["drafter_logits_bytes"].value
    of_drafter, of_both, of_target = (logits_bytes(model, 32, "cpu") for model in (DRAFT, WITH_DRAFT, TARGET))
    assert logits == of_drafter == of_both - of_target
    assert not any(name.startswith("drafter") for name in plain.resolved.settings)


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": True}, {"async_scheduling": False}], ids=str)
def test_on_a_gpu(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model("bfloat16", None)[1], "config", WITH_DRAFT)

    def load(config: ModelConfig, *rest: Any, **more: Any) -> Any:
        is_draft = config.num_layers == DRAFT.num_layers
        return (demo_draft() if is_draft else demo_model("bfloat16", None))[1]

    monkeypatch.setattr(worker_module, "load_model", load)
    accelerator = FakeAccelerator(free_bytes=[900 << 20])
    worker = GpuWorker(WITH_DRAFT, ignore, lambda: accelerator)
    _, draft = demo_draft()
    forward, strides = draft.forward, set[int]()

    def noted(batch: ForwardBatch) -> torch.Tensor:
        strides.update(table.block_tables_SM.stride(0) for table in batch.tables)
        return forward(batch)

    monkeypatch.setattr(draft, "forward", noted)
    config = replace(config_with(), num_gpu_blocks_override=100, **arguments)
    running = bring_up(config, WITH_DRAFT, [worker], is_server=True, progress=ignore)
    resolved = running.resolved
    scheduler = scheduler_of(resolved, WITH_DRAFT, cost_model())
    core = EngineCore(scheduler, running.executor, depth=resolved.scheduler.depth)
    tokens, num_drafts = drafted(core)
    assert strides == {256 // resolved.model.block_size}, "kernels are compiled for a stride: before serving"
    assert tokens == plain_tokens()
    assert num_drafts > 20 or resolved.scheduler.async_scheduling, "two steps in flight: newest tokens are not known"
    assert isinstance(worker.runner.drafting.drafter, DraftModel)
    assert (worker.runner.drafting.drafter.forward_pass.captured is None) == bool(arguments.get("enforce_eager"))
    assert worker.cache.num_bytes == resolved.memory.kv_cache_bytes


def test_settings_are_plain_data_and_follow_the_target() -> None:
    config = replace(config_with(), quantization="int8", kv_cache_dtype="fp8")
    resolved = resolve(config, WITH_DRAFT, FACTS, is_server=True)
    settings = WorkerSettings.of(resolved)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=WorkerSettings) == settings
    assert settings.drafter is not None
    assert settings.drafter.form == replace(resolved.model, max_model_len=DRAFT.max_model_len)
    assert settings.drafter.max_drafts == 4
    assert not settings.drafter.is_greedy
    resolved = resolve(
        config_with(
            quantization="int4",
            kv_cache_dtype="int8",
            max_model_len=99,
            draft_sample_method="greedy",
            draft_load_config={"load_format": "dummy"},
        ),
        WITH_DRAFT,
        FACTS,
        is_server=True,
    )
    assert resolved.drafter is not None
    form = resolved.drafter.form
    assert (form.quantization, form.kv_cache_dtype, form.max_model_len) == ("int4", "int8", 99)
    assert form.load_format == "dummy"
    assert resolved.drafter.is_greedy
    pages = KvPages.of(resolved, WITH_DRAFT)
    target, own = TARGET.kv_bytes_per_token(kv_format("auto", "bfloat16")), kv_format("int8", "bfloat16")
    assert pages.page_bytes == 16 * (target + DRAFT.kv_bytes_per_token(own))


LONGROPE = replace(DRAFT.rope, type="longrope", original_max_position=512, short_factor=(1.0,), long_factor=(2.0,))


def with_window(layer: LayerSpec) -> LayerSpec:
    full = layer.attention
    assert isinstance(full, Full)
    return replace(layer, attention=Window(size=64, **{each.name: getattr(full, each.name) for each in fields(full)}))


WINDOWS = tuple(map(with_window, TARGET.layers))


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({"quantization": "gptq"}, WITH_DRAFT, "checkpoint is in floating point"),
        ({"kv_cache_dtype": "float32"}, WITH_DRAFT, "no KV cache of this kind"),
        ({"draft_load_config": {"load_format": "pt"}}, WITH_DRAFT, "no such load_format"),
        ({}, replace(WITH_DRAFT, drafter=replace(DRAFT, rope=LONGROPE)), "longrope"),
        ({}, replace(WITH_DRAFT, rope=LONGROPE), "longrope"),
        ({}, replace(WITH_DRAFT, layers=WINDOWS), "keeps all tokens in no layer"),
        ({}, TARGET, "no drafter of this kind"),
    ],
    ids=str,
)
def test_what_cannot_draft(options: dict[str, Any], model: ModelConfig, message: str) -> None:
    speculation = SpeculativeConfig(method="draft_model", model=DRAFT.model, **options)
    form = resolve(EngineConfig(), TARGET, FACTS, is_server=True).model
    with pytest.raises(ConfigError, match=message):
        drafter_settings(speculation, model, form)


def test_the_draft_model_is_found() -> None:
    speculation = SpeculativeConfig(method="draft_model", model=str(demo.path("draft")))
    parts = open_model(EngineConfig(speculative_config=speculation), ignore)
    assert parts.model_config.drafter_folder == demo.path("draft")
    assert find_model(config_with(), None, weights=False)[2].drafter == DRAFT
    assert open_model(EngineConfig(), ignore).model_config.drafter_folder is None


def test_the_revision_is_of_the_draft_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def resolve_model(name: str, revision: str | None, *source: Any, weights: bool) -> Path:
        asked.append((name, revision))
        return demo.path("draft" if name == "small/draft" else "target")

    monkeypatch.setattr("quire.entry.launch.resolve_model", resolve_model)
    monkeypatch.setattr("quire.entry.launch.find_gguf", lambda *source, weights: None)
    speculation = SpeculativeConfig(method="draft_model", model="small/draft", revision="v2")
    config = EngineConfig(model="large/target", revision="v1", speculative_config=speculation)
    assert find_model(config, None, weights=False)[2].drafter == DRAFT
    assert asked == [("large/target", "v1"), ("small/draft", "v2")]


def test_a_draft_model_with_a_mistyped_name_ends_the_start_with_a_near_one(tmp_path: Path) -> None:
    shutil.copytree(demo.path("draft"), tmp_path / "small-draft")
    speculation = SpeculativeConfig(method="draft_model", model=str(tmp_path / "smal-draft"))
    with pytest.raises(QuireError) as caught:
        open_model(EngineConfig(speculative_config=speculation), ignore)
    assert "No such folder" in str(caught.value)
    assert f"Did you mean {tmp_path / 'small-draft'}?" in str(caught.value)


def test_an_unknown_hub_id_of_a_draft_model_gives_near_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "models--small--draft-600").mkdir()
    (tmp_path / "models--other--target").mkdir()
    speculation = SpeculativeConfig(method="draft_model", model="small/draft-60")
    with pytest.raises(QuireError) as caught:
        open_model(EngineConfig(speculative_config=speculation, download_dir=str(tmp_path)), ignore)
    assert "'small/draft-60'" in str(caught.value)
    assert "did you mean small/draft-600?" in str(caught.value)


def test_another_vocabulary_is_refused_and_other_padding_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(demo.path("draft"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    names = {token_id: token for token, token_id in vocab.items()}
    vocab[names[300]], vocab[names[400]] = 400, 300
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = EngineConfig(speculative_config=SpeculativeConfig(method="draft_model", model=str(folder)))
    with pytest.raises(ConfigError) as caught:
        open_model(config, ignore)
    assert f"token 300 is {names[300]!r}" in str(caught.value)
    assert caught.value.value == names[400]
    padded = Tokenizer.from_folder(demo.path("draft"))
    padded.backend.add_tokens(["<padding>"])
    check_same_vocabulary(Tokenizer.from_folder(demo.path("target")), padded)
    check_same_vocabulary(padded, Tokenizer.from_folder(demo.path("target")))
