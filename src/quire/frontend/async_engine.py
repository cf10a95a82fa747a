"""AsyncEngine: the front end of a server. Every request has a stream, and one of the engines computes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Unpack

from quire.errors import AdapterError, InvalidRequestError, NotReadyError, QuireError, ShuttingDownError
from quire.frontend.adapters import Adapters, absolute
from quire.frontend.admission import Refusals
from quire.frontend.grammar_pool import GrammarPool
from quire.frontend.input_processor import InputProcessor, ProcessedRequest, RequestOptions
from quire.frontend.prompts import PromptType
from quire.frontend.replica import Replica, as_dead
from quire.frontend.router import work_seconds
from quire.frontend.stream import RequestStream
from quire.frontend.timeline import RequestTimeline
from quire.frontend.tracing import RequestTracer
from quire.logs import get_logger
from quire.lora.modules import LoraModule
from quire.messages import EngineProgress, EngineReady, SetLimits
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams

logger = get_logger(__name__)

INLINE_PROMPT_CHARS = 4096  # about 1 ms of tokenization; longer texts are tokenized in a thread


class AsyncEngine:
    """Takes requests and gives streams of outputs, over one or more engines of the same model and settings.

    The first start ends when all replicas are ready. If one cannot start, all end. After it, requests are taken while
    any replica is ready. If an engine fails, its replica starts the next one, and other replicas go on with its
    requests. A replica that gives up leaves its work to the others; without any replica the server ends.

    Args:
        replicas: one or more replicas, by their index. AsyncEngine owns them.
        input_processor: it is replaced when the engines' context length is known.
        modules: adapters that are read before requests are taken; None: the engines compute no adapters.
        clock: gives monotonic seconds; the replicas have the same clock.
        tracer: the tracer of the replicas. It is closed with AsyncEngine.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        input_processor: InputProcessor,
        *,
        modules: Sequence[LoraModule] | None = (),
        clock: Callable[[], float] = time.monotonic,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.replicas = list(replicas)
        self.input_processor = input_processor
        self.adapters = Adapters(self.replicas, is_enabled=modules is not None)
        self.on_progress: Callable[[EngineProgress], None] | None = (
            None  # gets the slowest replica's reports of a start
        )
        self.grammars = None if input_processor.tokenizer is None else GrammarPool(input_processor)
        self.error: QuireError | None = None  # the reason why no engine is left
        self.refusals = Refusals()
        self._clock, self._tracer = clock, tracer
        self._settled = asyncio.Event()  # ready or dead
        self._modules = list(modules or ())  # the adapters that are not read yet
        self._reading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to receive. It needs a running event loop and is called once."""
        for replica in self.replicas:
            replica.start(self._on_change, self._show_progress)

    async def wait_ready(self, timeout: float | None = None) -> EngineReady:
        """Wait until requests are taken. If an engine fails before this returns, it waits for the next one.

        Raises:
            QuireError: the engine could not start. NotReadyError: it was not ready within `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                while (ready := self.ready) is None:
                    if self.error is not None:
                        raise self.error
                    await self._settled.wait()
        except TimeoutError:
            raise NotReadyError(f"The engine was not ready within {timeout:g} seconds", fix="See its log") from None
        return ready

    @property
    def ready(self) -> EngineReady | None:
        """The facts of an engine, from the first replica that takes requests; None: no replica takes any."""
        if self.error is not None or not self._has_started:
            return None
        return next((replica.facts for replica in self.replicas if replica.is_ready), None)

    @property
    def _has_started(self) -> bool:
        """Whether every replica has been ready once, and the adapters of the start were read."""
        return not self._modules and self._have_replicas_started

    @property
    def _have_replicas_started(self) -> bool:
        return all(replica.facts is not None for replica in self.replicas)

    async def _read_modules(self) -> None:
        """Read the adapters of the start. An error of one ends the start."""
        try:
            for module in self._modules:
                await self.adapters.load(module.name, absolute(module.path), base_model_name=module.base_model_name)
        except QuireError as error:
            self._give_up(error)
        except Exception as error:
            logger.exception("the adapters of the start could not be read")
            self._give_up(AdapterError(f"An adapter could not be loaded ({type(error).__name__})"))
        self._modules = []
        self._on_change()

    def _give_up(self, error: QuireError) -> None:
        self.error = error
        for replica in self.replicas:
            if replica.error is None:
                replica.close(self.error, "error")

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: each engine has produced a token, and at least one is alive."""
        return self.ready is not None

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken, and at least one engine sends signs of life and ends its steps in time.

        An unhealthy engine is replaced. This must not cost requests of the healthy engines.
        """
        return self.is_ready and any(replica.is_healthy for replica in self.replicas)

    @property
    def is_restarting(self) -> bool:
        """Whether the engines of all replicas have failed, and no new one is ready yet."""
        return self.error is None and self._has_started and not self.is_ready

    @property
    def progress(self) -> EngineProgress | None:
        """The progress of the replica that is furthest from ready; None: no replica starts, or requests are taken."""
        reports = [replica.progress for replica in self.replicas if replica.progress is not None]
        return min(reports, key=lambda report: report.stage) if reports and not self.is_ready else None

    @property
    def failure(self) -> str | None:
        """The reason why the last engine was lost, while the next one starts; else None."""
        return next((replica.failure for replica in self.replicas if replica.failure is not None), None)

    @property
    def num_unfinished(self) -> int:
        """The number of requests without their last output."""
        return sum(replica.num_unfinished for replica in self.replicas)

    def adapter_names(self) -> tuple[set[str], set[str]]:
        """The adapters of unfinished requests: of requests that have a token, and of requests that have none yet."""
        running: set[str] = set()
        waiting: set[str] = set()
        for replica in self.replicas:
            replica.output_processor.add_adapter_names(running, waiting)
        return running, waiting

    def timeline(self, request_id: str) -> RequestTimeline | None:
        """The timeline of a recent request; None: it is unknown or forgotten."""
        timelines = (replica.output_processor.timelines.get(request_id) for replica in self.replicas)
        return next((timeline for timeline in timelines if timeline is not None), None)

    async def add_request(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        adapter: str | None = None,
        data_parallel_rank: int | None = None,
        came_time: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Check, tokenize and send one request. The caller must iterate the stream to its end or close it.

        Args:
            adapter: a name among `adapters`; None: the base model.
            data_parallel_rank: the index of the replica that shall compute it, or of a lane of the only engine;
                None: the one with the least work.
            came_time: when the request came to the server, for the measured time outside the engine; None: now.

        Raises:
            ModelNotFoundError: there is no such adapter.
            InvalidRequestError, ContextLengthError: the request is refused. QueueFullError: the engine's queue is full.
            NotReadyError, EngineDeadError: there is no engine yet, or no longer.
            CompilerLostError: the constraint could not be compiled now.
        """
        self._pick(data_parallel_rank).check_room()
        arrival_time = self._clock()
        processed = await self.process(prompt, sampling_params, request_id, arrival_time, **options)
        waited = self._clock() - arrival_time
        replica = self._pick(data_parallel_rank, len(processed.prompt_token_ids), waited)
        if any(request_id in each.output_processor for each in self.replicas):
            raise InvalidRequestError(
                "The request id is in use", value=request_id, fix="Use another id", param="request_id"
            )
        replica.check_room(len(processed.prompt_token_ids), waited)
        if data_parallel_rank is not None and self._num_lanes > 1:
            processed = processed.on_lane(data_parallel_rank % self._num_lanes)
        if adapter is not None:  # it may have been replaced while the prompt was read
            processed = processed.with_adapter(self.adapters.find(adapter))
        return replica.add(processed, arrival_time if came_time is None else came_time)

    async def process(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str,
        arrival_time: float,
        **options: Unpack[RequestOptions],
    ) -> ProcessedRequest:
        """Check and tokenize a request: see InputProcessor.process. GrammarPool.grammar names further errors."""
        params = sampling_params if isinstance(sampling_params, SamplingParams) else None
        grammar = None
        if params is not None and params.structured_outputs is not None and self.grammars is not None:
            grammar = await self.grammars.grammar(params.structured_outputs)

        def process() -> ProcessedRequest:
            return self.input_processor.process(
                request_id, prompt, sampling_params, arrival_time=arrival_time, grammar=grammar, **options
            )

        is_slow = params is not None and (bool(params.bad_words) or has_many_ids(params.allowed_token_ids))
        return await asyncio.to_thread(process) if is_slow or _is_long(prompt) else process()

    def _pick(self, rank: int | None = None, num_prompt_tokens: int = 1, waited: float = 0.0) -> Replica:
        """The replica for a new request: the replica that was asked for, or else the replica with room that has least
        work.

        See Admission.refusal for `num_prompt_tokens` and `waited`.

        Raises InvalidRequestError, NotReadyError, EngineDeadError.
        """
        self.check_running()
        if rank is not None:
            return self._of_rank(rank)
        ready = [replica for replica in self.replicas if replica.is_ready]
        if len(ready) == 1:
            return ready[0]
        recent = [replica.admission.recent_answers for replica in ready]
        answer_steps = sum(steps for steps, _ in recent) / sum(num_answers for _, num_answers in recent)
        pace = ready[0].admission.pace

        def rank_of(replica: Replica) -> tuple[bool, bool, float, int]:
            has_room = replica.has_room(num_prompt_tokens, waited)
            work = work_seconds(replica.backlog, pace, answer_steps)
            return not replica.client.is_alive, not has_room, work, replica.num_unfinished

        return min(ready, key=rank_of)

    @property
    def _num_lanes(self) -> int:
        """The number of lanes of each engine."""
        return next((replica.facts.num_lanes for replica in self.replicas if replica.facts is not None), 1)

    def check_rank(self, rank: int) -> None:
        """Raise InvalidRequestError if there is no such replica."""
        num_ranks = len(self.replicas) * self._num_lanes
        if not 0 <= rank < num_ranks:
            raise InvalidRequestError(
                "There is no replica of this rank",
                value=rank,
                expected=f"0 to {num_ranks - 1}",
                fix="Leave it out: the replica with the least work is chosen",
                param="data_parallel_rank",
            )

    def _of_rank(self, rank: int) -> Replica:
        self.check_rank(rank)
        replica = self.replicas[rank // self._num_lanes]
        if not replica.is_ready:
            raise NotReadyError(f"Replica {rank} has no engine now", fix="Retry, or name no replica")
        return replica

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        adapter: str | None = None,
        data_parallel_rank: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """`add_request` and its stream as one generator. Errors come at its first step; leaving it aborts."""
        stream = await self.add_request(
            prompt, sampling_params, request_id, adapter=adapter, data_parallel_rank=data_parallel_rank, **options
        )
        async with stream:
            async for output in stream:
                yield output

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests. Their readers' streams end without a further output; unknown ids are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            for replica in self.replicas:
                replica.abort(request_id)

    def set_limits(self, limits: SetLimits) -> None:
        """Move limits of every engine. Raises NotReadyError, EngineDeadError."""
        self.check_running()
        for replica in self.replicas:
            replica.set_limits(limits)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompts that no running request uses. Raises NotReadyError, EngineDeadError."""
        self.check_running()
        for replica in self.replicas:
            replica.reset_prefix_cache()

    def check_running(self) -> None:
        """Raise NotReadyError while no engine is ready, EngineDeadError (ShuttingDownError) when none will be."""
        if self.error is not None:
            raise as_dead(self.error) from self.error
        if not self.is_ready:
            again = " again, after a failure" if self.is_restarting else ""
            progress = self.progress
            phase = f" ({progress.phase}, {progress.fraction:.0%})" if progress is not None else ""
            raise NotReadyError(f"The engine is starting{again}{phase}", fix="Retry in a few seconds")

    def check_room(self) -> None:
        """Refuse early, before a request costs anything. Raises QueueFullError."""
        if self.is_ready:
            self._pick().check_room()

    def _show_progress(self) -> None:
        """Show progress once every replica has said how far it is, so that the progress never goes back."""
        is_known = all(replica.is_ready or replica.progress is not None for replica in self.replicas)
        if self.on_progress is not None and is_known and (progress := self.progress) is not None:
            self.on_progress(progress)

    def _on_change(self) -> None:
        """React to a replica that became ready, lost its engine, or gave up."""
        errors = [replica.error for replica in self.replicas if replica.error is not None]
        if self.error is None and errors and (len(errors) == len(self.replicas) or not self._has_started):
            self._give_up(errors[0])  # the others wait for the replica that could not start
        if self._modules and self._reading is None and self._have_replicas_started:
            self._reading = asyncio.get_running_loop().create_task(self._read_modules(), name="adapters of the start")
        if self.is_ready:
            max_model_len = min(replica.facts.max_model_len for replica in self.replicas if replica.facts is not None)
            self.input_processor = self.input_processor.with_max_model_len(max_model_len)
            self._move_requests()
        if self.is_ready or self.error is not None:
            self._settled.set()
        else:
            self._settled.clear()

    def _move_requests(self) -> None:
        """Move the requests of replicas that have no engine to replicas that have one."""
        if not any(replica.is_ready and replica.client.is_alive for replica in self.replicas):
            return  # the others are dead as well, and it is not noticed yet
        for replica in self.replicas:
            if not replica.is_ready and (released := replica.release()):
                logger.info("requests of engine %d that go to other engines: %d", replica.index, len(released))
                for request, stream in released:
                    self._pick().take_over(request, stream)

    def close(self) -> None:
        """Tell the engines to stop, end every stream and free the connections. May be called again."""
        error = ShuttingDownError("The server is shutting down", fix="Ask another server")
        self.error = self.error or error
        for replica in self.replicas:
            replica.close(error, "abort")
        if self.grammars is not None:
            self.grammars.close()
        self._settled.set()

    async def shutdown(self) -> None:
        """`close`, and wait until receiving has stopped."""
        self.close()
        for replica in self.replicas:
            await replica.wait_closed()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


def has_many_ids(ids: Sequence[int] | None) -> bool:
    """Whether a list of token ids is long: to check a million takes 0.1 s."""
    return ids is not None and len(ids) > INLINE_PROMPT_CHARS


def _is_long(prompt: PromptType) -> bool:
    """Whether a prompt is long: a text, or token ids, because each id is checked."""
    given = (prompt.get("prompt_token_ids") or prompt.get("prompt")) if isinstance(prompt, dict) else prompt
    return isinstance(given, (str, list, tuple)) and len(given) > INLINE_PROMPT_CHARS
