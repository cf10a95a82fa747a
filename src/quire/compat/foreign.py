"""The answer to one foreign name: a notice, a translation, or a refusal that names the way out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import ConfigError

Kind = Literal["accepted", "translated", "refused"]
Shape = Literal["switch", "value", "list"]

# Spellings of "not set", on the command line and in Python. Whatever the name, they ask for nothing.
_NOTHING = ("", "none", "null", "{}", "[]", "()")


@dataclass(frozen=True)
class Foreign:
    """A name of vLLM's that is no setting here.

    Args:
        name: the name as LLM(...) spells it; the flag has dashes.
        kind: accepted: it has no effect, and a notice says so. translated: it becomes other settings. refused: it is an
            error.
        text: the reason, without a full stop: the behaviour in place of the setting, its present name, or the missing
            feature.
        instead: the advice for a refused name.
        shape: the form of its flag's values.
        off: the values that change nothing. None and its spellings always change nothing.
        becomes: for a translated name, makes the present settings from a value.
    """

    name: str
    kind: Kind
    text: str
    instead: str = ""
    shape: Shape = "value"
    off: tuple[Any, ...] = ()
    becomes: Callable[[Any], dict[str, Any]] | None = None

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether the value asks for the behaviour that Quire has anyway."""
        shown = str(value).strip().lower()
        return value is None or shown in _NOTHING or any(shown == str(item).lower() for item in self.off)

    def translation(self, value: Any) -> dict[str, Any]:
        """The present settings for a value; empty: it has no effect. Raises ConfigError for an illegal value."""
        return {} if self.becomes is None else self.becomes(_parsed(value))

    def refusal(self, spelled: str, value: Any) -> ConfigError:
        """The error for a refused name."""
        shown_off = " or ".join(str(item) for item in self.off if item is not False)
        return ConfigError(
            f"{spelled} is not supported: {self.text}",
            value=None if self.shape == "switch" else value,
            expected=f"{shown_off}, or nothing" if shown_off else None,
            fix=self.instead or f"Leave {spelled} out",
            param=self.name,
        )


def accepted(
    text: str,
    *,
    values: str = "",
    switches: str = "",
    lists: str = "",
    off: tuple[Any, ...] = (),
) -> Iterator[Foreign]:
    """Names that change nothing here, all for the same reason.

    Args:
        text: the reason, without a full stop.
        values, switches, lists: names of flags with a value, without one, and with several, separated by spaces.
        off: see Foreign.
    """
    yield from _each("accepted", text, "", values, switches, lists, off)


def refused(
    text: str,
    instead: str = "",
    *,
    values: str = "",
    switches: str = "",
    lists: str = "",
    off: tuple[Any, ...] = (),
) -> Iterator[Foreign]:
    """Names that would change something that Quire cannot change, all for the same reason. See `accepted`.

    Args:
        instead: the advice.
    """
    yield from _each("refused", text, instead, values, switches, lists, off)


def translated(name: str, text: str, becomes: Callable[[Any], dict[str, Any]], shape: Shape = "value") -> Foreign:
    """A name that becomes another setting."""
    return Foreign(name, "translated", text, shape=shape, becomes=becomes)


def _each(
    kind: Kind,
    text: str,
    instead: str,
    values: str,
    switches: str,
    lists: str,
    off: tuple[Any, ...],
) -> Iterator[Foreign]:
    shapes: tuple[tuple[Shape, str], ...] = (("value", values), ("switch", switches), ("list", lists))
    for shape, names in shapes:
        for name in names.split():
            yield Foreign(name, kind, text, instead, shape, off or ((False,) if shape == "switch" else ()))


def _parsed(value: Any) -> Any:
    """The JSON value in the text of a flag, or the value itself if there is none."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
