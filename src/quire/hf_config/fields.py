"""Checked access to a JSON object. An error names the file, the field, the value and the expected value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelConfigError

MAX_INTEGER = 1 << 40  # far above any real size; arithmetic with it cannot exhaust memory
MAX_NUMBER = 1e30  # far above any real factor; its square is still a float
_FIX = "Use the config.json that belongs to the checkpoint"


class Fields:
    """A view of one object. An absent value and null are the same."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def get(self, name: str) -> Any:
        """The raw value or None."""
        return self.values.get(name)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """A whole number; without `default` it must be there."""
        value = self.values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.illegal(name, f"a whole number from {minimum} to {maximum}")
        return value

    def number(
        self, name: str, default: float | None = None, minimum: float = -MAX_NUMBER, maximum: float = MAX_NUMBER
    ) -> float:
        """A number; without `default` it must be there. NaN, infinity and integers beyond a float are illegal."""
        value = self.values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise self.illegal(name, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise self.illegal(name, "true or false")
        return value

    def text(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """A text that must be one of `choices`."""
        value = self.values[name] if self.has(name) else default
        if value not in choices:
            raise self.illegal(name, "one of " + ", ".join(choices))
        return str(value)

    def sequence(self, name: str, item: type, min_length: int = 0) -> list[Any] | None:
        """A list of at least `min_length` items of one type, or None."""
        value = self.values.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) < min_length
            or not all(isinstance(entry, item) for entry in value)
        ):
            raise self.illegal(name, f"a list of at least {min_length} items of type {item.__name__}")
        return value

    def numbers(self, name: str, length: int, minimum: float, maximum: float) -> tuple[float, ...]:
        """A list of exactly `length` numbers."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != length:
            raise self.illegal(name, f"a list of {length} numbers")
        return tuple(Fields({name: entry}, self.path).number(name, None, minimum, maximum) for entry in value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them."""
        value = self.values.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0 for entry in values):
            raise self.illegal(name, "a token id or a list of token ids")
        return tuple(values)

    def object(self, name: str) -> Fields:
        """A nested object; empty if absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.illegal(name, "an object")
        return Fields(value or {}, self.path)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """These values, with `defaults` for absent ones. A null of the file stays null."""
        return Fields({**defaults, **self.values}, self.path)

    def illegal(self, name: str, expected: str) -> ModelConfigError:
        """The error about one field, for the caller to raise."""
        if not self.has(name):
            return ModelConfigError(f"{self.path} lacks {name}", expected=expected, fix=_FIX)
        return ModelConfigError(
            f"{self.path} has an illegal {name}", value=self.values[name], expected=expected, fix=_FIX
        )
