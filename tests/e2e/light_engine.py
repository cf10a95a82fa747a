"""The engine process as Quire starts it, but for the worker: it has no model and no torch, so it starts at once.

Over this engine a server answers, listens, streams, drains and ends in the same way. Its tokens come from
DeterministicExecutor: a hash of the tokens before.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

from quire import extension
from quire.config import EngineConfig
from quire.engine import process
from quire.engine.deterministic import DeterministicExecutor
from quire.engine.rank_spawn import RankInterpreter
from quire.errors import AdapterChangedError, AdapterNotFoundError
from quire.formats.weight_format import packs_floats
from quire.life_cycle import CacheSize, Measured, WorkerSettings
from quire.lora.facts import AdapterFacts
from quire.messages import Progress
from quire.metrics.stopwatch import Lap
from quire.model_config import ModelConfig
from quire.planning import devices
from quire.planning.memory_plan import MemoryFacts, buffer_bytes, logits_bytes, work_bytes
from quire.resolve import DeviceFacts, shown_bytes
from quire.schedule import Pending, ScheduledBatch, StepResult

STEP_SECONDS = 0.003  # so that answers are seen on their way


class LightWorker:
    """See quire.life_cycle.Worker: with the phases, and the plan, of one that reads weights."""

    def __init__(self, model_config: ModelConfig, progress: Progress) -> None:
        self._model, self._progress = model_config, progress

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        return devices.detect(extension.chosen_isa())

    def load(self, settings: WorkerSettings) -> None:
        self._settings = settings
        model, isa = settings.model, settings.device.isa
        self._weights = self._model.weight_bytes(model.dtype, model.quantization, is_packed=packs_floats(isa))
        self._progress("load", 1.0, f"{shown_bytes(self._weights)} of nothing")

    def measure(self) -> Measured:
        settings = self._settings
        logits = logits_bytes(self._model, settings.num_logits_rows, "cpu")
        buffers = buffer_bytes(self._model, settings.max_num_batched_tokens, settings.model.dtype, "cpu")
        memory = MemoryFacts(
            total_bytes=devices.total_memory_bytes(),
            free_bytes=devices.free_memory_bytes() - self._weights,
            weight_bytes=self._weights,
            work_bytes=work_bytes(buffers, "cpu") + logits,
            logits_bytes=logits,
        )
        return Measured(memory, 256, Lap(0.01))

    def allocate(self, size: CacheSize) -> None:
        vocab_size = min(1000, self._model.vocab_size)
        self._steps = DeterministicExecutor(size.num_blocks, self._settings.model.block_size, vocab_size=vocab_size)

    def capture(self) -> None:
        """Nothing is captured."""

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        future: Future[StepResult] = Future()
        try:
            future.set_result(self.execute(batch))
        except Exception as error:  # delivered by result(), as from any worker
            future.set_exception(error)
        return future

    def begin(self, batch: ScheduledBatch) -> None:
        """It computes in `execute`."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        time.sleep(STEP_SECONDS)
        for row in batch.new_rows:
            if row.sampling_params.temperature == 0:  # greedy: its seed, which the front end has drawn, means nothing
                row.sampling_params.seed = 0
        return self._steps.submit(batch).result()

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        """There are no grammars."""

    def use_idle_time(self, num_blocks_ever_used: int) -> bool:
        return False

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> Loaded:
        """Any folder with weights is an adapter, whose content is their bytes."""
        future = Loaded()
        try:
            content = (Path(path) / "adapter_model.safetensors").read_bytes()
        except OSError:
            future.set_exception(AdapterNotFoundError("There is no adapter at this path", value=path))
            return future
        found = hashlib.sha256(content).hexdigest()
        if digest in (None, found):
            future.set_result(AdapterFacts(found, 8, len(content), 1))
        else:
            future.set_exception(AdapterChangedError("The adapter's files changed after it was loaded"))
        return future

    def drop_adapter(self, digest: str) -> None:
        """There is no memory to give back."""

    def check_alive(self) -> None:
        """It lives as long as its engine."""

    def describe(self) -> str:
        return "The light worker"

    def give_up(self) -> None:
        """It is never late."""

    def whereabouts(self) -> tuple[object, ...]:
        return ()

    def late(self, pending: Sequence[int]) -> dict[int, str]:
        return {}

    def close(self) -> None:
        """Nothing to give back."""


class Loaded(Future[AdapterFacts]):
    """Nothing is kept."""

    def add(self) -> None: ...


class Ranks(ModuleType):
    """Stands for quire.engine.ranks, which loads torch."""

    @staticmethod
    def start_ranks(
        config: EngineConfig,
        model_folder: Path,
        model_config: ModelConfig,
        progress: Progress,
        *,
        drafter_folder: Path | None,
        is_server: bool,
        engine_index: int,
        interpreters: list[RankInterpreter],
    ) -> tuple[LightWorker]:
        assert config.tensor_parallel_size == 1, "one light worker is all ranks"
        assert "torch" not in sys.modules, "a light engine has loaded torch, and starts as slowly as a real one"
        return (LightWorker(model_config, progress),)


def without_torch() -> None:
    """From now on, quire.engine.start finds this worker."""
    sys.modules["quire.engine.ranks"] = Ranks("quire.engine.ranks")


if __name__ == "__main__":
    without_torch()
    sys.exit(process.main())
