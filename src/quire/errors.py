"""Exceptions of Quire: code, HTTP status, what happened, the value seen, what is expected and how to fix it."""

from __future__ import annotations

import re
from typing import Any, ClassVar


def printable(text: str) -> str:
    """A text that neither moves a terminal's cursor nor colours it: what is no character of a line is spelled out.

    That is control characters, those that turn the direction of text among them, but not the ends of lines.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class QuireError(Exception):
    """Base of every error a user can cause or must act on.

    Args:
        what: one sentence that says what happened.
        value: the offending value, shown shortened.
        expected: what would have been accepted.
        fix: what to do.
        param: name of the request field or flag the error is about.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    MAX_VALUE_CHARS: ClassVar[int] = 120

    def __init__(
        self,
        what: str,
        *,
        value: Any = None,
        expected: str | None = None,
        fix: str | None = None,
        param: str | None = None,
    ) -> None:
        self.what, self.value, self.expected, self.fix, self.param = what, value, expected, fix, param
        super().__init__(self.message)

    def rename(self, param: str, given: str) -> None:
        """Speak of the field `param` by the name under which it was given."""

        def renamed(text: str) -> str:
            return re.sub(rf"\b{param}\b", given, text)

        self.what = renamed(self.what)
        self.expected, self.fix, self.param = (text and renamed(text) for text in (self.expected, self.fix, self.param))

    @property
    def message(self) -> str:
        parts = [self.what.rstrip(".") + "."]
        if self.value is not None:
            shown = repr(self.value)
            if len(shown) > self.MAX_VALUE_CHARS:
                shown = shown[: self.MAX_VALUE_CHARS] + "..."
            parts.append(f"Got {shown}.")
        if self.expected:
            parts.append(f"Expected {self.expected.rstrip('.')}.")
        if self.fix:
            parts.append(self.fix if self.fix.endswith(("?", "!")) else self.fix.rstrip(".") + ".")
        return printable(" ".join(parts))


class InvalidRequestError(QuireError, ValueError):
    """A request field has an illegal value."""

    code, status = "invalid_value", 400


class UnsupportedFieldError(InvalidRequestError):
    """A request field that would change the output is unknown, removed or not supported."""

    code = "unsupported_field"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested tokens do not fit the model's context."""

    code = "context_length_exceeded"


class ModelNotFoundError(QuireError):
    """The request names a model that is not served."""

    code, status = "model_not_found", 404


class QueueFullError(QuireError):
    """The waiting queue is at its limit."""

    code, status = "queue_full", 429
    retry_after_seconds: int | None = None  # when there should be room again, where that is known


class TargetMissedError(QueueFullError):
    """The first token would come later than the target of the server (--slo-ttft)."""

    code = "ttft_target"


class EngineDeadError(QuireError):
    """The engine process ended or does not answer."""

    code, status = "engine_dead", 503


class EngineRestartedError(EngineDeadError):
    """The engine ended under a request that could not be sent to the next one; others are served again soon."""

    code = "engine_restarted"


class ShuttingDownError(EngineDeadError):
    """The server was told to stop: it takes no new request, and ended this one if it still ran."""

    code = "shutting_down"


class OutOfMemoryError(QuireError):
    """A step could not allocate what it needed, and this request was ended so that the others go on."""

    code, status = "out_of_memory", 503


class RendererLostError(QuireError):
    """The process that renders chats ended or stood still, for no reason of the request's, and so did the next one."""

    code, status = "renderer_lost", 503


class NotReadyError(QuireError):
    """The engine is still starting, or starting again."""

    code, status = "not_ready", 503


class ConfigError(QuireError, ValueError):
    """A flag, environment variable or config value is illegal or does not fit the model or the machine."""

    code, status = "bad_config", 400


class ModelConfigError(ConfigError):
    """config.json is missing, malformed or describes an unsupported architecture."""

    code = "bad_model_config"


class WeightsError(ConfigError):
    """Weights are missing, unexpected, misshapen, truncated or in a refused format."""

    code = "bad_weights"


class MemoryPlanError(ConfigError):
    """Weights, KV cache and reserve do not fit into the memory allowed."""

    code = "out_of_memory_plan"
