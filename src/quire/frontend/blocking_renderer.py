"""RenderPool for programs without an event loop, or with a loop that must not wait: LLM.chat()."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from quire.frontend.bounded_pool import MAX_PROCESSES
from quire.frontend.render_pool import RenderPool
from quire.frontend.render_process import Render


class BlockingRenderer:
    """A RenderPool with its own event loop in a thread. Its processes end with this object.

    Arguments and errors: see RenderPool.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._pool = RenderPool(*args, **options)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name="chat templates", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._pool, self._loop)

    def render(self, asked: Sequence[Render]) -> list[str]:
        """The prompts' texts. Raises the first error: see RenderPool.render."""

        async def render_all() -> list[str]:
            turns = asyncio.Semaphore(MAX_PROCESSES)

            async def render(one: Render) -> str:
                async with turns:
                    return await self._pool.render(one)

            return await asyncio.gather(*map(render, asked))

        return asyncio.run_coroutine_threadsafe(render_all(), self._loop).result()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


def _close(pool: RenderPool, loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon_threadsafe(pool.close)
    loop.call_soon_threadsafe(loop.stop)
