"""Renders chats in a few bounded processes. The event loop never runs a template."""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import ConfigError, InvalidRequestError, RendererLostError
from quire.frontend.bounded_pool import MAX_SECONDS, BoundedPool
from quire.frontend.bounded_process import framed
from quire.frontend.render_process import Render, Templates


class RenderPool(BoundedPool):
    """ChatRenderer behind processes, with the same arguments, texts and errors.

    Args:
        max_seconds: processor time of one rendering. After it the process is killed and the request refused.
    Raises:
        ConfigError: a template is not valid. RendererLostError: the process ended without an answer.
    """

    module = "quire.frontend.render_process"
    task = "renders chats"
    culprit = "chat template"
    lost = RendererLostError

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        override: str | None = None,
        name: str = "The model",
        content_as_parts: bool | None = None,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        given = Templates(dict(templates), dict(special_tokens), override, name, max_seconds, content_as_parts)
        super().__init__(lambda: given)
        self._idle.put_nowait(self._start())
        self._num_processes = 1

    async def render(self, asked: Render) -> str:
        """The prompt's text.

        Raises:
            InvalidRequestError: see ChatRenderer.render; or the template took too much processor time or memory.
            ConfigError: there is no template.
            RendererLostError: two processes ended or stood still, and the template is not the reason.
        """
        try:
            frame = framed(asked)
        except (OverflowError, ValueError) as error:
            raise InvalidRequestError(
                f"The messages cannot be written as JSON: {error}",
                expected="text, and numbers of 64 bits",
                param="messages",
            ) from None
        return await self.text(frame)

    def unprepared(self, fault: str) -> ConfigError:
        return ConfigError(
            f"The chat template {fault} while it was compiled",
            fix="Give another one with --chat-template",
            param="chat_template",
        )

    def refusal(self, fault: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"The chat template {fault} on these messages",
            fix="Send fewer or shorter messages; the operator may give another template with --chat-template",
            param="messages",
        )
