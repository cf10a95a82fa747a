"""One request's outputs on the way to a reader. Unread outputs are merged, so a slow reader takes bounded memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from quire.errors import QuireError
from quire.outputs import CompletionOutput, RequestOutput


class RequestStream:
    """Async iterator over one request's outputs. Iterate to the end, or close it to free the request in the engine.

    It has one reader, on the engine's event loop.

    Args:
        on_written: called once, with the seconds from the first delta until its reader came back for the next one.
    """

    __slots__ = (
        "_error",
        "_first_time",
        "_has_read",
        "_is_delta",
        "_is_finished",
        "_on_leave",
        "_on_written",
        "_unread",
        "_waiter",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        *,
        is_delta: bool,
        on_leave: Callable[[str], None],
        on_written: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.request_id = request_id
        self._is_delta = is_delta
        self._on_leave = on_leave
        self._on_written: Callable[[float], None] | None = on_written if is_delta else None  # None: nothing to tell
        self._first_time = 0.0  # the time of the first `put`; 0: there was none
        self._has_read = False
        self._unread: RequestOutput | None = None
        self._error: QuireError | None = None
        self._is_finished = False  # no further `put` follows
        self._waiter: asyncio.Future[None] | None = None

    def move(self, on_leave: Callable[[str], None]) -> None:
        """Another replica computes the request from now on."""
        self._on_leave = on_leave

    def put(self, output: RequestOutput) -> None:
        """Add an output, or merge it with an unread one."""
        self._first_time = self._first_time or time.monotonic()
        self._unread = output if self._unread is None else merge_outputs(self._unread, output, self._is_delta)
        self._is_finished = output.finished
        self._wake()

    def fail(self, error: QuireError) -> None:
        """End the stream: the reader gets the unread output, then the error."""
        self._error, self._is_finished = error, True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._has_read and self._on_written is not None:
            on_written, self._on_written = self._on_written, None
            on_written(time.monotonic() - self._first_time)
        while self._unread is None:
            if self._is_finished:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            await self._wait()
        output, self._unread = self._unread, None
        self._has_read = True
        return output

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._waiter = None

    def close(self) -> None:
        """The reader leaves. Aborts the request if it still runs."""
        if not self._is_finished:
            self._is_finished = True
            self._on_leave(self.request_id)
            self._wake()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()


def merge_outputs(first: RequestOutput, second: RequestOutput, is_delta: bool) -> RequestOutput:
    """`second` with the missing parts of `first`. Deltas of a continuation are joined; cumulative outputs replace."""
    by_index = {completion.index: completion for completion in first.outputs}
    for completion in second.outputs:
        earlier = by_index.get(completion.index)
        by_index[completion.index] = _join(earlier, completion) if is_delta and earlier is not None else completion
    second.outputs = [by_index[index] for index in sorted(by_index)]
    if second.prompt_logprobs is None:
        second.prompt_logprobs = first.prompt_logprobs
    return second


def _join(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    first.text += second.text
    first.token_ids += second.token_ids
    if first.logprobs is not None and second.logprobs is not None:
        first.logprobs += second.logprobs
    first.cumulative_logprob = second.cumulative_logprob
    first.finish_reason, first.stop_reason = second.finish_reason, second.stop_reason
    return first
