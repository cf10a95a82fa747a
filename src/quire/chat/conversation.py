"""The state of a chat: its turns, its system prompt, and the parameters that were set for its answers."""

from __future__ import annotations

import json
from typing import Any

from quire.compat.names import nearest
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams

# name -> its description, for people
PARAMETERS = {
    "temperature": "0: always the most likely token; higher: more chance",
    "top_p": "only the most likely tokens that together have this probability",
    "top_k": "only this number of the most likely tokens; 0: all",
    "min_p": "only tokens at least this likely, relative to the likeliest",
    "max_tokens": "length of an answer; else up to the context's end",
    "min_tokens": "an answer has at least this length",
    "seed": "of the random choice: the same seed, the same answer",
    "stop": "a text that ends an answer, or a JSON list of them",
    "presence_penalty": "against tokens that the answer has",
    "frequency_penalty": "against tokens, by how often the answer has them",
    "repetition_penalty": "against tokens that question or answer have; 1: none",
}
SYSTEM = "system"
DEFAULT = "default"  # the value that removes a setting


class Conversation:
    """A conversation whose turns alternate. A question is kept only together with its answer, or with a part of it."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.parameters: dict[str, Any] = {}

    def asked(self, question: str) -> list[dict[str, str]]:
        """The messages to answer, with the question as the last."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def set(self, name: str, text: str) -> None:
        """Set a parameter or the system prompt from text; `default` removes the setting.

        Raises InvalidRequestError for an unknown name or an illegal value; then nothing is changed.
        """
        if name == SYSTEM:
            self.system = None if text in (DEFAULT, "") else text
            return
        if name not in PARAMETERS:
            near = nearest(name, [*PARAMETERS, SYSTEM])
            raise InvalidRequestError(
                f"There is no parameter {name[:64]!r}",
                expected=f"one of {', '.join(PARAMETERS)}, {SYSTEM}",
                fix=f"Did you mean {near}?" if near else None,
                param=name[:64],
            )
        changed = {other: value for other, value in self.parameters.items() if other != name}
        if text != DEFAULT:
            changed[name] = _value(name, text)
        SamplingParams(**{"max_tokens": None} | changed)  # SamplingParams checks the values
        self.parameters = changed


def _value(name: str, text: str) -> Any:
    """The value in a text: a number, or for `stop` a text or a list of texts. SamplingParams refuses other values."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if name == "stop" and not isinstance(value, (str, list)) else value
