"""Exceptions of Quire. Each has a code, an HTTP status, the event, the value, the expected value and the fix."""

from __future__ import annotations

import re
from typing import Any, ClassVar


def printable(text: str) -> str:
    """A text that cannot move a terminal's cursor or change its colour: control characters are spelled out.

    Characters that turn the direction of text are spelled out too. Line ends stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class QuireError(Exception):
    """The base of every error that a user can cause or must act on.

    Args:
        what: one sentence that says what happened.
        value: the wrong value; a long one is shortened.
        expected: a value that would be accepted.
        fix: advice.
        param: name of the request field or flag.
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
        """Call the field `param` by the name that the user gave."""

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


class ConstraintError(InvalidRequestError):
    """No token may come next: a constraint cannot go on, or the request's fields together exclude every token."""

    code = "constraint_failed"


class ModelNotFoundError(QuireError):
    """The request names a model that is not served."""

    code, status = "model_not_found", 404


class QueueFullError(QuireError):
    """The waiting queue is at its limit."""

    code, status = "queue_full", 429
    retry_after_seconds: int | None = None  # the expected time until there is room; None: not known


class TargetMissedError(QueueFullError):
    """The first token would come later than the target of the server (--slo-ttft)."""

    code = "ttft_target"


class EngineDeadError(QuireError):
    """The engine process ended or does not answer."""

    code, status = "engine_dead", 503


class PeerLostError(EngineDeadError):
    """A rank cannot go on, because another rank of its engine has failed. That one's error says more."""


class EngineRestartedError(EngineDeadError):
    """Several engines ended during a request, which may be the reason. A new engine will serve other requests soon."""

    code = "engine_restarted"


class ShuttingDownError(EngineDeadError):
    """The server is stopping. It takes no new request, and it ended this request if it was running."""

    code = "shutting_down"


class OutOfMemoryError(QuireError):
    """A step could not allocate its memory. This request was ended so that the others continue."""

    code, status = "out_of_memory", 503


class ProcessLostError(QuireError):
    """A bounded process of the front end failed, and so did the next one. The request is not the reason."""


class RendererLostError(ProcessLostError):
    """The process that renders chats."""

    code, status = "renderer_lost", 503


class CompilerLostError(ProcessLostError):
    """The process that compiles grammars."""

    code, status = "compiler_lost", 503


class VocabularyError(QuireError):
    """This model's tokenizer cannot be used for constraints."""

    code, status = "no_constraints", 501


class NotReadyError(QuireError):
    """The engine is starting for the first time or again."""

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
    """Weights, KV cache and reserve do not fit into the allowed memory."""

    code = "out_of_memory_plan"


class AdapterError(QuireError):
    """A LoRA adapter is malformed, of an unsupported kind, or does not fit the model or the settings."""

    code, status = "bad_adapter", 400


class AdapterNotFoundError(AdapterError):
    """There is no adapter in this place, or the place may not be read. The two are not told apart."""

    code, status = "adapter_not_found", 404


class AdapterChangedError(AdapterError):
    """The files of a registered adapter are gone, or have another content than at its registration."""

    code, status = "adapter_changed", 503


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, or that was the cause: a MemoryError, or torch's RuntimeErrors for it."""
    while error is not None:
        is_torch = isinstance(error, RuntimeError) and (
            "allocate memory" in str(error) or "out of memory" in str(error)
        )
        if is_torch or isinstance(error, MemoryError):
            return True
        error = error.__cause__
    return False
