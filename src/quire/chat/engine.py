"""The command's own model: an engine process beside it, without a server and without a port."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Generator, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from quire.chat.conversation import PARAMETERS
from quire.chat.model import Piece
from quire.config import EngineConfig, ServerConfig
from quire.entry.launch import (
    EngineProcesses,
    FrontEndParts,
    default_template_kwargs,
    open_model,
    read_chat_template,
    start_async_engine,
)
from quire.entry.spawn import EngineInterpreter
from quire.errors import ConfigError
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.render_pool import RenderPool
from quire.frontend.render_process import Render
from quire.frontend.supervisor import ready_seconds
from quire.messages import EngineProgress, Progress
from quire.sampling_params import RequestOutputKind, SamplingParams

T = TypeVar("T")


class EngineModel:
    """A model in an engine process, for a `with` statement: in the block the engine is ready, after it it has ended.

    The event loop of the front end has its own thread, because the main thread waits for input and handles Ctrl-C.

    Args:
        interpreters: these processes become the engines; the caller ends them.
        progress: a function that is told about the start.
    """

    def __init__(
        self, config: EngineConfig, chat: ServerConfig, interpreters: Sequence[EngineInterpreter], progress: Progress
    ) -> None:
        self._config, self._interpreters, self._progress = config, interpreters, progress
        self._template_kwargs = default_template_kwargs(chat)
        template = read_chat_template(chat.chat_template)
        self._parts = open_model(config, progress)
        self.name = self._parts.model_name
        self._renderer = _renderer(self._parts, template)
        self._engine: AsyncEngine | None = None
        self._processes: EngineProcesses | None = None
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event loop", daemon=True)

    def __enter__(self) -> EngineModel:
        self._thread.start()
        try:
            self._wait_for(self._start())
        except BaseException:
            for interpreter in self._interpreters:
                interpreter.kill()  # while it loads, it reads no message
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The model's defaults. For parameters without a default of the model, Quire's default is used."""
        params = self._params({})
        return {name: getattr(params, name) for name in PARAMETERS}

    def answer(
        self, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any]
    ) -> Generator[Piece, None, None]:
        """See ChatModel. It waits for an engine that has failed and is starting again."""
        pieces: SimpleQueue[Piece | None] = SimpleQueue()
        generation = self._generate(messages, self._params(parameters), pieces)
        future = asyncio.run_coroutine_threadsafe(generation, self._loop)
        future.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            future.result()
        finally:
            future.cancel()

    def _params(self, given: Mapping[str, Any]) -> SamplingParams:
        """`given` over the model's defaults. An answer may fill the context, as in the chat API."""
        fields = {"max_tokens": None, **self._parts.input_processor.defaults, **given}
        return SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)

    async def _start(self) -> None:
        self._progress("start", 0.0, "the engine's process")
        self._engine, self._processes = start_async_engine(
            self._config, self._parts, interpreters=self._interpreters, has_constraints=False
        )
        self._engine.on_progress = self._show
        self._engine.start()
        await self._engine.wait_ready(ready_seconds())
        self._engine.on_progress = None

    def _show(self, progress: EngineProgress) -> None:
        self._progress(progress.phase, progress.fraction, progress.detail)

    async def _generate(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams, pieces: SimpleQueue[Piece | None]
    ) -> None:
        assert self._engine is not None, "the model was not entered"
        await self._engine.wait_ready(ready_seconds())
        prompt = await self._renderer.render(
            Render([dict(message) for message in messages], kwargs=self._template_kwargs)
        )
        # The template has written the special tokens. The room in the context bounds max_tokens.
        stream = self._engine.generate(
            prompt, params, str(next(self._numbers)), add_special_tokens=False, clamp_max_tokens=True
        )
        async for output in stream:
            for completion in output.outputs:
                pieces.put(Piece(completion.text, completion.finish_reason))

    async def _stop(self) -> None:
        """End the engines. It also runs after an interrupted `_start`."""
        if self._engine is not None and self._processes is not None:
            await self._engine.shutdown()
            self._processes.stop()

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the event loop's thread and return its result. Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def _close(self) -> None:
        self._renderer.close()
        self._wait_for(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _renderer(parts: FrontEndParts, template: str | None) -> RenderPool:
    """The processes that apply the chat template. Raises ConfigError for a model that cannot chat."""
    if parts.tokenizer is None:
        raise ConfigError(
            "A chat needs the model's tokenizer", fix="Leave --skip-tokenizer-init out", param="skip_tokenizer_init"
        )
    if template is None and not parts.tokenizer.chat_templates:
        raise ConfigError(
            "The model has no chat template, so it can only continue texts",
            value=parts.model_name,
            fix="Use its variant for chats (-Instruct, -it), or give a template with --chat-template FILE",
            param="chat_template",
        )
    return RenderPool(
        parts.tokenizer.chat_templates, parts.tokenizer.special_tokens, override=template, name=parts.tokenizer.name
    )
