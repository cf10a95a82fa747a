"""Words of the playground's tests: open the page, ask."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.server.browser import ENTER, Browser
from tests.server.serving import RunningServer

# JavaScript conditions: this number of answers is whole; a question can be sent.
ANSWERED = "document.querySelectorAll('.assistant:not([aria-busy])').length == args[0]"
READY = "!document.querySelector('#send').disabled && document.querySelector('#model').value"


def open_page(browser: Browser, server: RunningServer) -> None:
    browser.open(server.url)
    browser.wait(READY)


def ask(browser: Browser, question: str, answers: int = 1) -> None:
    """Type a question where the focus is, and wait until this number of answers is whole."""
    browser.press(question + ENTER)
    browser.wait(ANSWERED, answers)


def kept_chats(browser: Browser) -> list[dict[str, Any]]:
    """What the page's database holds."""
    return browser.js(
        """new Promise((done, fail) => {
            const opening = indexedDB.open("quire");
            opening.onerror = fail;
            opening.onsuccess = () => {
                const chats = opening.result.transaction("chats").objectStore("chats").getAll();
                chats.onsuccess = () => { opening.result.close(); done(chats.result); };
            };
        })"""
    )


@contextmanager
def speaking(pieces: Sequence[str | dict[str, Any]], seconds: float = 0.0) -> Iterator[RunningServer]:
    """A server that streams these contents or deltas to every chat, also texts that no tokenizer gives.

    Args:
        seconds: between two of them.
    """

    async def chat(request: Request) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            for number, piece in enumerate(pieces, 1):
                usage = {"prompt_tokens": 1, "completion_tokens": number, "total_tokens": number + 1}
                delta = {"content": piece} if isinstance(piece, str) else piece
                choice = {"index": 0, "delta": delta, "finish_reason": None}
                yield f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\n"
                await asyncio.sleep(seconds)
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    with RunningServer() as server:
        server.app.router.routes.insert(0, Route("/v1/chat/completions", chat, methods=["POST"]))
        yield server
