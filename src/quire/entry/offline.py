"""Runs requests to their end on an engine in this process. After an error or an interrupt nothing of them is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.demo import DEMO_MODEL_NAME
from quire.engine.core import EngineCore
from quire.entry.interrupt import interrupts_between_steps
from quire.errors import InvalidRequestError, QuireError
from quire.frontend.input_processor import ProcessedRequest
from quire.frontend.output_processor import OutputProcessor, error_of
from quire.logs import get_logger
from quire.lora.facts import AdapterFacts
from quire.lora.registry import AdapterRegistry
from quire.lora.request import Registration
from quire.messages import AdapterState, LoadAdapter, UnloadAdapter, joined
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind
from quire.screen.progress_bar import ProgressBar

if TYPE_CHECKING:
    from quire.engine.start import StartedEngine
    from quire.metrics.prometheus import PrometheusMetrics

logger = get_logger(__name__)

UseTqdm = bool | Callable[..., Any]


def engine_metrics(config: EngineConfig, engine: StartedEngine) -> PrometheusMetrics:
    """The metrics for LLM.get_metrics(), with the names and labels of a server."""
    from quire.metrics.prometheus import PrometheusMetrics  # slow to import, and few ask for it

    name = config.served_model_name[0] if config.served_model_name else config.model or DEMO_MODEL_NAME
    max_model_len = engine.resolved.model.max_model_len
    metrics = PrometheusMetrics.of_config(config, name, max_model_len, model=engine.model_config)
    metrics.engines[0].on_ready(engine.ready_message())
    return metrics


class OfflineRunner:
    """The loop around one EngineCore.

    Args:
        core: the engine. It makes steps only while a caller waits.
        outputs: makes the outputs of the requests.
    """

    def __init__(self, core: EngineCore, outputs: OutputProcessor) -> None:
        self._core, self._outputs = core, outputs
        self._has_tokenizer = False  # whether the engine has the tokenizer that grammars need
        self._finished: dict[str, tuple[RequestOutput, QuireError | None]] = {}  # until the caller collects them
        # Outputs of unfinished requests, until they are collected: all deltas; of cumulative outputs the newest.
        self._unread: dict[str, list[RequestOutput]] = {}
        self._in_deltas: set[str] = set()  # ids of requests whose outputs are deltas
        self._operations = itertools.count()
        self._loads: dict[int, AdapterState | None] = {}  # by operation; None: no answer has come yet

    def load_adapter(self, path: str) -> AdapterFacts:
        """Step the engine until it has read an adapter. Raises AdapterError."""
        assert self._core.adapters is not None
        operation = next(self._operations)
        self._loads[operation] = None
        try:
            with self._all_or_nothing(()) as check_interrupt:
                self._core.adapters.load(LoadAdapter(operation, path, is_awaited=True))
                while (state := self._loads[operation]) is None:
                    self._step()
                    check_interrupt()
        finally:
            del self._loads[operation]
        if state.facts is None:
            raise error_of(state.error_code, state.error or "")
        return state.facts

    def unload_adapter(self, adapter: Registration) -> None:
        """Remove an adapter. Requests that run with it finish with it."""
        assert self._core.adapters is not None
        self._core.adapters.unload(UnloadAdapter(adapter.digest, adapter.path))

    def run(self, processed: Sequence[ProcessedRequest], use_tqdm: UseTqdm = False) -> list[RequestOutput]:
        """The final output of every request, in order.

        If all requests fail, it raises the QuireError of the first one. If only some fail, their outputs and the log
        say so.
        """
        request_ids = self._new_ids(processed)
        with self._all_or_nothing(request_ids) as check_interrupt:
            self._add(processed, check_interrupt)
            return self._collect(request_ids, use_tqdm, check_interrupt)

    def enqueue(self, processed: Sequence[ProcessedRequest]) -> list[str]:
        """Hand requests to the engine without stepping it. Returns their ids."""
        request_ids = self._new_ids(processed)
        with self._all_or_nothing(request_ids) as check_interrupt:
            self._add(processed, check_interrupt)
        return request_ids

    def wait(self, request_ids: Sequence[str], use_tqdm: UseTqdm = False) -> list[RequestOutput]:
        """The final outputs of enqueued requests, in this order. Raises as `run` does."""
        with self._all_or_nothing(request_ids) as check_interrupt:
            return self._collect(request_ids, use_tqdm, check_interrupt)

    def step(self, request_ids: Collection[str]) -> list[RequestOutput]:
        """Make one step of the engine. Returns all outputs of these requests that were not returned before.

        A failed request raises no error: its output has the error.
        """
        with interrupts_between_steps() as check_interrupt:
            if self._core.has_work():
                self._step()
            check_interrupt()
        running = [output for name in request_ids for output in self._unread.pop(name, ())]
        ended = [name for name in request_ids if name in self._finished]
        self._in_deltas.difference_update(ended)
        return running + [self._finished.pop(name)[0] for name in ended]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests and their outputs. Unknown ids are ignored."""
        request_ids = list(request_ids)
        self._core.abort(self._outputs.abort(request_ids))
        for request_id in request_ids:
            self._finished.pop(request_id, None)
            self._forget_unread(request_id)

    @contextmanager
    def _all_or_nothing(self, request_ids: Sequence[str]) -> Iterator[Callable[[], None]]:
        """Yields the check for Ctrl-C."""
        try:
            with interrupts_between_steps() as check_interrupt:
                yield check_interrupt
        except BaseException:
            self.abort(request_ids)
            raise

    def _new_ids(self, processed: Sequence[ProcessedRequest]) -> list[str]:
        for request in processed:
            if request.request_id in self._outputs or request.request_id in self._finished:
                raise InvalidRequestError(
                    "The request id is in use", value=request.request_id, fix="Use another id", param="request_id"
                )
        return [request.request_id for request in processed]

    def _add(self, processed: Sequence[ProcessedRequest], check_interrupt: Callable[[], None]) -> None:
        for request in processed:
            self._outputs.add(request)
            if request.sampling_params.output_kind is RequestOutputKind.DELTA:
                self._in_deltas.add(request.request_id)
            if request.tokenizer is not None and not self._has_tokenizer:
                self._core.use_tokenizer(request.tokenizer)
                self._has_tokenizer = True
            self._core.add(joined(request.requests))
            check_interrupt()

    def _collect(
        self, request_ids: Sequence[str], use_tqdm: UseTqdm, check_interrupt: Callable[[], None]
    ) -> list[RequestOutput]:
        """Make steps until these requests are finished. Other requests in the engine are computed beside them."""
        waiting = set(request_ids) - self._finished.keys()
        bar = ProgressBar(len(waiting), use_tqdm) if use_tqdm else None
        try:
            while waiting:
                for output in self._step():
                    if output.finished and output.request_id in waiting:
                        waiting.remove(output.request_id)
                        if bar is not None:
                            bar.add(output)
                check_interrupt()
        finally:
            if bar is not None:
                bar.close()
        for request_id in request_ids:
            self._forget_unread(request_id)
        results = [self._finished.pop(request_id) for request_id in request_ids]
        errors = [error for _, error in results if error is not None]
        if errors and len(errors) == len(results):
            raise errors[0]
        for output, error in results:
            if error is not None:
                logger.error("request %s failed: %s", output.request_id, error.message)
        return [output for output, _ in results]

    def _step(self) -> list[RequestOutput]:
        """Make one step of the engine. Returns its outputs, which are kept until they are collected."""
        assert self._core.has_work(), "requests are waited for that the engine does not have"
        deltas = self._core.step()
        if self._core.last_record is not None:
            self._outputs.metrics.on_step(self._core.last_record)
        if self._core.adapters is not None:
            self._take_loads(self._core.adapters)
        result = self._outputs.process(deltas)
        if result.abort_ids:
            self._core.abort(result.abort_ids)
        for output in result.outputs:
            if output.finished:
                if output.prompt_logprobs is not None:
                    output.prompt_logprobs = list(output.prompt_logprobs)
                self._finished[output.request_id] = (output, result.errors.get(output.request_id))
            if output.request_id not in self._in_deltas:
                self._unread[output.request_id] = []
            if not output.finished:
                self._unread.setdefault(output.request_id, []).append(output)
        return result.outputs

    def _forget_unread(self, request_id: str) -> None:
        self._unread.pop(request_id, None)
        self._in_deltas.discard(request_id)

    def _take_loads(self, adapters: AdapterRegistry) -> None:
        """Hand loaded adapters to the callers that wait. After Ctrl-C no caller waits, so the adapter is dropped."""
        for state in adapters.take_states():
            self._outputs.metrics.on_adapter_read(state)
            if state.operation in self._loads:
                self._loads[state.operation] = state
            elif state.operation is not None and state.facts is not None:
                adapters.unload(UnloadAdapter(state.facts.digest, state.path))
