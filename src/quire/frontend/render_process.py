"""A process that renders chat templates: see bounded_process.

A template comes with a model, and its input comes from unknown clients. Jinja has operations that no sandbox counts
(formatting widths, `center`, constants that are folded while compiling). So templates are compiled and run here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quire.frontend import bounded_process
from quire.frontend.chat_template import ChatRenderer


class Templates(msgspec.Struct):
    """The arguments of ChatRenderer, and the processor time for compiling and for each rendering."""

    templates: dict[str, str]
    special_tokens: dict[str, str]
    override: str | None
    name: str
    max_seconds: float
    content_as_parts: bool | None = None


class Render(msgspec.Struct):
    """The arguments of ChatRenderer.render: any JSON. ChatRenderer checks them."""

    messages: Any
    tools: Any = None
    documents: Any = None
    kwargs: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def main() -> None:
    """Serve the socket on standard input until it ends."""
    bounded_process.run(Templates, _renderer)


def _renderer(given: Templates) -> Callable[[bytes], str]:
    renderer = ChatRenderer(
        given.templates,
        given.special_tokens,
        override=given.override,
        name=given.name,
        content_as_parts=given.content_as_parts,
    )

    def render(body: bytes) -> str:
        asked = msgspec.json.decode(body, type=Render)
        return renderer.render(
            asked.messages,
            tools=asked.tools,
            documents=asked.documents,
            kwargs=asked.kwargs,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )

    return render


if __name__ == "__main__":
    main()
