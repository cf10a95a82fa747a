"""A worker: one model on one device, taken step by step from the facts of its machine to running batches."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch

from quire import extension
from quire.distributed.device_group import on_devices
from quire.distributed.group import AgreedError, GroupError, RankLate, Ranks, StepVoid
from quire.errors import EngineDeadError, MemoryPlanError, PeerLostError
from quire.kernels import cpu, gpu, gpu_facts
from quire.life_cycle import AdapterLoad, CacheSize, Measured, WorkerSettings
from quire.loader.load import load_model
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.form import ALONE, Sharing
from quire.models.registry import CausalLM
from quire.moe.dispatch import Dispatch
from quire.planning import devices
from quire.resolve import DeviceFacts, shown_bytes
from quire.schedule import Pending, Polled, RowsFailedError, ScheduledBatch, StepResult
from quire.worker import kv_cache
from quire.worker.accelerator import Accelerator, Cuda
from quire.worker.adapters import WorkerAdapters
from quire.worker.drafts import HoldAtRandom
from quire.worker.gpu_memory import OnGpu
from quire.worker.host_memory import OnHost
from quire.worker.kv_cache import PagedCache
from quire.worker.model_runner import ModelRunner, PendingStep
from quire.worker.prefault import Prefault

LOADED_BEFORE_DRAFTER = 0.9  # share of the progress of loading: most drafters have at most a tenth of the model's size


class Place(Protocol):
    """The device of a worker: everything in the life of a worker that depends on the kind of device."""

    kv_cache_knob: str  # the flag for the size of the KV cache on this device, besides the flags with exact numbers
    memory_device: torch.device

    def measure(self, model: CausalLM, drafter: CausalLM | None, settings: WorkerSettings) -> Measured:
        """Measure the memory and the time of a step, on a temporary KV cache."""
        ...

    def runner(
        self,
        model: CausalLM,
        drafter: CausalLM | None,
        adapters: Mapping[str, int],
        cache: PagedCache,
        settings: WorkerSettings,
        progress: Progress,
    ) -> ModelRunner:
        """Make the runner of the steps, with captured steps.

        Args:
            adapters: the slots of the adapters in memory, by digest. They may change between steps.
        """
        ...


class DeviceWorker:
    """The life_cycle.FirstWorker that computes on a device. Ranks other than the first use it too.

    Args:
        model_config: the config of the model to load. If ranks share the model, it describes the part of this rank.
        progress: is told the progress of loading and capturing.
        accelerator: makes the Accelerator, if the device is a GPU.
        ranks: the ranks that share the model; None: there is one rank.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        progress: Progress,
        accelerator: Callable[[], Accelerator] = Cuda,
        ranks: Ranks | None = None,
    ) -> None:
        self._model_config, self._progress, self._accelerator = model_config, progress, accelerator
        self._ranks = ranks
        self._behind: deque[_StepOfRank] = deque()  # see execute
        # Each of these is set by one step of the worker's life.
        self.settings: WorkerSettings
        self.place: Place
        self.model: CausalLM
        self.drafter: CausalLM | None
        self.adapters: WorkerAdapters | None
        self.measured: Measured
        self.cache: PagedCache
        self.runner: ModelRunner
        self._prefault: Prefault

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        if (wished := extension.wished_isa()) is not None:
            cpu.set_isa(wished)
        isa = cpu.isa() if cpu.available() else "torch"
        return devices.detect(isa, gpu_facts.detect() if wants_gpu else "none was looked for")

    def load(self, settings: WorkerSettings) -> None:
        device, form = settings.device, settings.model
        is_on_gpu = device.device == "cuda"
        if cpu.available():
            cpu.set_num_threads(device.num_threads)
        torch.set_num_threads(device.num_threads)
        if device.deterministic and is_on_gpu:
            gpu.be_deterministic()
        accelerator = self._accelerator() if is_on_gpu else None
        if accelerator is not None and self._ranks is not None:
            with self._as_rank("connecting its GPU"):
                self._ranks = on_devices(self._ranks, accelerator)
        config = replace(self._model_config, max_model_len=form.max_model_len)
        share = 1.0 if settings.drafter is None else LOADED_BEFORE_DRAFTER
        with self._as_rank("reading weights"):
            sharing = _sharing(self._ranks, form.decode_context_parallel_size)
            model = load_model(config, form, device, self._loading(0.0, share), sharing=sharing)
        self.settings, self.model = settings, model
        self.adapters = None
        if settings.lora is not None:
            assert isinstance(model, Decoder), "resolve refuses adapters for others"
            self.adapters = WorkerAdapters(model, settings.lora)
        with self._as_rank("reading the drafter's weights"):
            self.drafter = self._load_drafter(model, settings)
        self.place = OnHost(self._ranks) if accelerator is None else OnGpu(accelerator, self._ranks)
        if not is_on_gpu and isinstance(model, Decoder) and cpu.available() and not model.computes_with_torch:
            # A thread that has computed for torch spins, and so it takes a core from the kernels of the next layers.
            torch.set_num_threads(1)
        name = form.quantization or form.dtype
        name = name if is_on_gpu or not cpu.available() else f"packed {name}"
        self._progress("load", 1.0, f"{shown_bytes(model.weight_bytes())} of {name}")

    def _load_drafter(self, target: CausalLM, settings: WorkerSettings) -> CausalLM | None:
        config, drafter = self._model_config.drafter, settings.drafter
        if config is None or drafter is None:
            return None
        config = replace(config, max_model_len=drafter.form.max_model_len)
        group = self._ranks.group if self._ranks is not None and config.vocab_share is not None else None
        sharing = Sharing(group=group, num_kv_owners=drafter.form.decode_context_parallel_size)
        progress = self._loading(LOADED_BEFORE_DRAFTER, 1.0)
        return load_model(config, drafter.form, settings.device, progress, target=target, sharing=sharing)

    def _loading(self, first: float, last: float) -> Progress:
        """The progress of one part of loading, as a part of the whole."""
        return lambda phase, share, detail: self._progress(phase, first + share * (last - first), detail)

    def measure(self) -> Measured:
        with self._as_rank("measuring working memory"):
            self.measured = self.place.measure(self.model, self.drafter, self.settings)
        return self.measured

    def allocate(self, size: CacheSize) -> None:
        form = replace(self.settings.model, max_model_len=size.max_model_len)
        self.settings = replace(self.settings, model=form)
        try:
            self.cache = kv_cache.allocate_for(
                self.model.config, form, size.num_blocks, self.place.memory_device, self.settings.drafter
            )
        except (RuntimeError, OSError, OverflowError) as error:  # the system does not give that much memory
            raise MemoryPlanError(
                f"The system refuses {shown_bytes(size.num_bytes)} for the KV cache",
                expected=f"less than the {shown_bytes(self.measured.memory.free_bytes)} that are free",
                fix=f"Lower --kv-cache-memory-bytes, {self.place.kv_cache_knob} or --num-gpu-blocks-override",
                param="kv_cache_memory_bytes",
            ) from error
        self._prefault = Prefault(self.cache.pages, self.cache.num_owners)

    def capture(self) -> None:
        slots = {} if self.adapters is None else self.adapters.slots
        self.runner = self.place.runner(self.model, self.drafter, slots, self.cache, self.settings, self._progress)
        if rates := self.settings.synthetic_acceptance_rates:
            self.runner.verify = HoldAtRandom(rates).verify

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        return self._launch(batch) if self._ranks is None else self._launch_as(self._ranks, batch)

    def _launch_as(self, ranks: Ranks, batch: ScheduledBatch) -> _StepOfRank:
        start, waited = time.perf_counter(), ranks.waited_seconds
        ranks.begin_step()
        with self._as_rank("a step", in_step=True):
            if self.runner.balancer is not None:
                self.runner.balancer.begin_step()
            pending = self._launch(batch)
        is_committed = ranks.is_committed
        with self._as_rank("the end of a step"):
            ranks.end_step()
        return _StepOfRank(pending, ranks, start, ranks.waited_seconds - waited, is_committed=is_committed)

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        with nullcontext() if self.adapters is None else self.adapters.beside_step():
            return self.runner.submit(batch)

    def begin(self, batch: ScheduledBatch) -> None:
        """See Worker. This rank computes where it is called."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """See Worker. If this rank does not sample, nobody waits for its results, so its device may compute behind it.

        Then it waits for an earlier step: at most as many steps are in flight as on a rank that samples.
        """
        if self._ranks is None or self.samples or not self.runner.device.runs_ahead:
            return self.submit(batch).result()
        self._behind.append(step := self._launch_as(self._ranks, batch))
        while len(self._behind) >= self.settings.steps_in_flight:
            self._behind.popleft().result()
        return StepResult(batch.step_id, [], ranks=step.ranks())

    @property
    def is_behind(self) -> bool:
        """Whether there are steps that `execute` did not wait for."""
        return bool(self._behind)

    def catch_up(self) -> None:
        """Take in the steps that `execute` did not wait for, if the device has computed them by now.

        Raises EngineDeadError if the device has failed. The other ranks know it then.
        """
        while self._behind and self._behind[0].is_computed():
            self._behind.popleft().result()

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    @property
    def samples(self) -> bool:
        """Whether this rank samples. Other ranks learn the tokens."""
        return self._ranks is None or self._ranks.samples

    @contextmanager
    def _as_rank(self, phase: str, *, in_step: bool = False) -> Iterator[None]:
        """Tell the other ranks about an error in the block, so that they do not wait for this rank.

        Args:
            phase: the name of the work, for error messages.
            in_step: whether all ranks leave the step after an error and go on with the next step.
        """
        ranks = self._ranks
        try:
            yield
        except GroupError as error:
            if ranks is not None:
                ranks.fail()  # ranks on other machines do not know of the failure yet
            raise _lost(ranks, phase, error) from error
        except Exception as error:
            if ranks is None:
                raise
            try:
                _check_others(ranks)
            except GroupError as lost:
                ranks.fail()
                raise _lost(ranks, phase, lost) from error
            if not in_step:
                ranks.fail()
                raise
            if not _may_leave(ranks, error):
                ranks.fail(dead := _dead(ranks, error))
                if dead is error:
                    raise
                raise dead from error
            try:
                ranks.leave_step()
            except GroupError as lost:
                ranks.fail()
                raise _lost(ranks, phase, lost) from error
            if isinstance(error, AgreedError) and error.__cause__ is not None:
                raise error.__cause__ from None
            raise

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        self.runner.input_batch.grammars.use_tokenizer(tokenizer, eos_token_ids)

    def prepare_grammar(self, text: str) -> Polled[object]:
        return self.runner.input_batch.grammars.prepare(text)

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> AdapterLoad:
        assert self.adapters is not None
        return self.adapters.load(path, digest, is_awaited)

    def drop_adapter(self, digest: str) -> None:
        assert self.adapters is not None
        self.adapters.drop(digest)

    def check_alive(self) -> None:
        """See Worker. The process is this one, but its device may have failed while nobody waited for it."""
        if self._ranks is not None and self._ranks.own_failure is not None:
            raise self._ranks.own_failure

    def describe(self) -> str:
        rank, size = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.grid.size)
        return f"Rank {rank} of {size} (process {os.getpid()} on {platform.node()})"

    def give_up(self) -> None:
        if self._ranks is not None:
            self._ranks.fail()

    def whereabouts(self) -> tuple[object, ...]:
        return () if self._ranks is None else self._ranks.whereabouts.all()

    def late(self, pending: Sequence[int]) -> dict[int, str]:
        return {} if self._ranks is None else self._ranks.whereabouts.late(pending)

    def use_idle_time(self, num_blocks_ever_used: int) -> bool:
        """Touch memory of the KV cache that will be needed soon: see Prefault."""
        return self._prefault.step(num_blocks_ever_used)


class _StepOfRank:
    """A launched step of several ranks.

    Args:
        start: the time at which it began, on the clock of time.perf_counter.
        waited: the seconds that its launch has waited for other ranks.
        is_committed: see Group. Then the results of all ranks belong together, and an error ends all of them.
    """

    def __init__(self, pending: PendingStep, ranks: Ranks, start: float, waited: float, *, is_committed: bool) -> None:
        self._pending, self._ranks, self._start, self._waited = pending, ranks, start, waited
        self._is_committed = is_committed

    def ranks(self) -> tuple[tuple[float, float], ...]:
        """See StepResult.ranks, until now."""
        return ((time.perf_counter() - self._start, self._waited),)

    def is_computed(self) -> bool:
        """See PendingStep."""
        return self._pending.is_computed()

    def result(self) -> StepResult:
        try:
            result = self._pending.result()
            self._ranks.check()
        except Exception as error:
            self._say(error)
            raise
        result.ranks = self.ranks()
        return result

    def _say(self, error: Exception) -> None:
        """Tell the other ranks about an error that ends all of them. Raises EngineDeadError for one of another kind."""
        try:
            _check_others(self._ranks)
        except GroupError as lost:
            self._ranks.fail()
            raise _lost(self._ranks, "a step", lost) from error
        if isinstance(error, GroupError):  # this rank had failed in other work
            raise _lost(self._ranks, "a step", error) from error
        if isinstance(error, EngineDeadError) or self._is_committed:
            self._ranks.fail(dead := _dead(self._ranks, error))
            if dead is not error:
                raise dead from error


def _sharing(ranks: Ranks | None, num_kv_owners: int) -> Sharing:
    """The ranks with which this one shares the model."""
    if ranks is None:
        return ALONE
    dispatch = None
    if ranks.everyone is not None:
        dispatch = Dispatch(ranks.everyone, ranks.grid.lane(ranks.rank), ranks.grid.width)
    return Sharing(group=ranks.group, dispatch=dispatch, num_kv_owners=num_kv_owners)


def _check_others(ranks: Ranks) -> None:
    """Raise GroupError if another rank has failed, which explains all errors of this one."""
    if ranks.own_failure is None:
        ranks.check()


def _dead(ranks: Ranks, error: Exception) -> EngineDeadError:
    """The error with which the engine ends."""
    if isinstance(error, EngineDeadError):
        return error
    what = f"{type(error).__name__}: {error}"
    return EngineDeadError(f"Rank {ranks.rank} of {ranks.grid.size} failed in a step: {what}")


def _lost(ranks: Ranks | None, phase: str, error: Exception) -> EngineDeadError:
    """The error of a rank that cannot go on because another one has failed, or because it had failed itself."""
    if ranks is not None and ranks.own_failure is not None:
        return ranks.own_failure
    what = f"Rank {0 if ranks is None else ranks.rank} cannot go on with {phase}: {error}"
    if ranks is None or (failed := ranks.failing.failed_rank) is None:
        return PeerLostError(what)
    where = ranks.whereabouts
    if isinstance(error, RankLate):
        return EngineDeadError(f"{what}. Rank {failed} ({where.name(failed)}) {where.doing(failed)}")
    return PeerLostError(f"{what}. Rank {failed} is {where.name(failed)}")


def _may_leave(ranks: Ranks, error: Exception) -> bool:
    """Whether this rank may leave a step after an error.

    It must not leave if a rank of another stage or another GPU may wait for it, because such a rank does not leave the
    step with it. With GPUs, hosts of all stages leave it together, until they have agreed on it.
    """
    if isinstance(error, EngineDeadError) or ranks.is_committed:
        return False
    is_of_all_stages = isinstance(error, RowsFailedError) and error.__cause__ is None
    are_all_told = ranks.grid.num_stages == 1 or ranks.do_hosts_agree
    return are_all_told or is_of_all_stages or isinstance(error, (AgreedError, StepVoid))
