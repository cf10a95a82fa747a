"""Fields of a config: definition, type, choices, other spellings of values, and the source of each value."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import sys
import types
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quire.compat.values import SAME_VALUES, why_not
from quire.errors import ConfigError, QuireError

# The source of a value. argument: of LLM(...); file: --config; live: POST /v1/config; for the rest see resolve.py.
Source = Literal["flag", "argument", "file", "environment", "model", "device", "measured", "formula", "default", "live"]

KIB_SUFFIXES = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}


def parse_human_int(text: str | int) -> int:
    """`32k` = 32,000, `32K` = 32,768, `1M` = 1,048,576, `2.5k` = 2,500 (vLLM's suffixes); plain integers too."""
    if isinstance(text, int):
        return text
    number, factor = text.strip(), 1
    if number and number[-1] in KIB_SUFFIXES:
        number, factor = number[:-1], KIB_SUFFIXES[number[-1]]
    try:
        value = float(number) * factor if "." in number else int(number) * factor
        whole = int(value)
    except (ValueError, OverflowError):
        raise ConfigError(
            "Not a number", value=text, expected="an integer, or one with a suffix k, K, m, M, g or G"
        ) from None
    if value != whole:
        raise ConfigError("Not a whole number", value=text, expected="a whole number after applying the suffix")
    return whole


def parse_length(text: str | int) -> int:
    """A human number, or `auto` for -1."""
    return -1 if text == "auto" else parse_human_int(text)


ATTAINMENTS = 0.5, 0.9999  # least and greatest share of times that must reach a target
LEAST_SECONDS, MOST_SECONDS = 1e-6, 1e6  # the limits of a duration
DURATION = "a positive time: 500ms, 1.5s, or a number of seconds"


def parse_duration(text: str | float) -> float:
    """Seconds of `500ms`, `1.5s` or a plain number."""
    number = str(text).strip()
    for unit, factor in (("ms", 1e-3), ("s", 1.0), ("", 1.0)):
        if number.endswith(unit):
            try:
                seconds = float(number.removesuffix(unit)) * factor
            except ValueError:
                break
            if LEAST_SECONDS <= seconds <= MOST_SECONDS and not isinstance(text, bool):
                return seconds
            break
    raise ConfigError("Not a duration", value=text, expected=DURATION)


def shown_duration(seconds: float) -> str:
    """`12.3ms` or `1.5s`, rounded up, so that a target which a message proposes is accepted."""
    number, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    digits = 2 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{math.ceil(number * 10**digits) / 10**digits:g}{unit}"


def check_reachable(
    name: str, seconds: float | None, fastest: float, usual: float, kind: type[QuireError] = ConfigError
) -> None:
    """Raise `kind` for a target below the fastest step: every token would miss it.

    Args:
        fastest, usual: a step with one token of one request hardly ever takes less or more seconds than these.
    """
    if seconds is not None and seconds < fastest:
        raise kind(
            f"{name} is below the fastest step on this machine",
            value=shown_duration(seconds),
            expected=f"at least {shown_duration(fastest)}; {shown_duration(usual)} is reached in most steps",
            fix="Raise it, or take a smaller model, fewer bits or a faster machine",
            param=name,
        )


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a number may be, the ends included. `expected`: the same for people, if the two ends do not say it."""

    least: float
    most: float
    expected: str = ""


POSITIVE = Bounds(1, math.inf, "a positive number")
NOT_NEGATIVE = Bounds(0, sys.float_info.max, "0 or more")
SHARE = Bounds(sys.float_info.min, 1, "a share in (0, 1]")


def option(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    bounds: Bounds | None = None,
    type: Any = None,
    live: bool = False,
    many: bool = False,
    limits: str = "",
    secret: bool = False,
) -> Any:
    """A config field.

    Args:
        flags: other spellings on the command line.
        bounds: the bounds of the number, or of each number if there are several.
        type: a function from a flag's text to a value, or "json"; None: the field's own type.
        live: the value may change while serving.
        many: the field takes several values.
        limits: the quantity that the value bounds, for users who look for a bottleneck.
        secret: the value is never shown.
    """
    metadata = {
        "help": help,
        "flags": flags,
        "choices": choices,
        "bounds": bounds,
        "type": type,
        "live": live,
        "many": many,
        "limits": limits,
        "secret": secret,
    }
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def options(config: Any) -> tuple[dataclasses.Field[Any], ...]:
    """The settings of a config class: all fields except `sources`."""
    return tuple(f for f in dataclasses.fields(config) if "help" in f.metadata)


def normalise(config: Any) -> None:
    """Replace other spellings of a value that Python users write: `"32k"`, `torch.bfloat16`, a Path."""
    for f in options(config):
        value, plain = getattr(config, f.name), None
        if callable(f.metadata["type"]) and isinstance(value, str):
            plain = f.metadata["type"](value)
        elif f.metadata["many"] and value is not None and not isinstance(value, tuple):
            plain = tuple(value) if isinstance(value, list) else (value,)
        elif f.name == "dtype" and str(value).startswith("torch."):
            plain = str(value).removeprefix("torch.")
        elif isinstance(value, str) and value in (same := SAME_VALUES.get(f.name, {})):
            plain = same[value]
        elif isinstance(value, os.PathLike):
            plain = os.fspath(value)
        if plain is not None:
            object.__setattr__(config, f.name, plain)  # this runs in the constructor, before anybody sees the config


def field_type(annotation: Any) -> tuple[type, bool, bool]:
    """The type of a field: (type without None, whether it is a tuple of that type, whether it may be None)."""
    is_optional = False
    if get_origin(annotation) in (Union, types.UnionType):
        is_optional = types.NoneType in get_args(annotation)
        annotation = next(a for a in get_args(annotation) if a is not types.NoneType)
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], True, is_optional
    return get_origin(annotation) or annotation, False, is_optional


@cache
def _field_types(config_type: type) -> dict[str, tuple[type, bool, bool]]:
    """`field_type` of every field."""
    return {name: field_type(annotation) for name, annotation in get_type_hints(config_type).items()}


def check_types(config: Any) -> None:
    """Raise ConfigError for a value with another type than its field."""
    for name, (kind, is_tuple, is_optional) in _field_types(config.__class__).items():
        value = getattr(config, name)
        if value is None and is_optional:
            continue
        items = value if is_tuple and isinstance(value, (tuple, list)) else [value]
        for item in items:
            is_number = kind is float and isinstance(item, int)
            if (isinstance(item, bool) and kind is not bool) or not (isinstance(item, kind) or is_number):
                raise ConfigError(
                    f"{name} has the wrong type, {type(item).__name__}",
                    value=value,
                    expected=kind.__name__ + (" or several" if is_tuple else "") + (" or None" if is_optional else ""),
                    param=name,
                )


def check_values(config: Any) -> None:
    """Raise ConfigError for a value that is not among its field's choices, or out of its bounds."""
    for f in options(config):
        choices, bounds, value = f.metadata["choices"], f.metadata["bounds"], getattr(config, f.name)
        numbers = () if bounds is None or value is None else value if f.metadata["many"] else (value,)
        if not all(bounds.least <= number <= bounds.most for number in numbers):
            raise ConfigError(
                f"Illegal value of {f.name}",
                value=value,
                expected=bounds.expected or f"{bounds.least} to {bounds.most}",
                param=f.name,
            )
        if not choices or value in choices or (value is None and f.default is None):
            continue
        check_foreign(f.name, value)
        near = difflib.get_close_matches(str(value), choices, 1)
        raise ConfigError(
            f"Illegal value of {f.name}",
            value=value,
            expected="one of " + ", ".join(choices),
            fix=f"Did you mean {near[0]!r}?" if near else None,
            param=f.name,
        )


def check_foreign(name: str, value: object) -> None:
    """Raise ConfigError for a vLLM value that the setting `name` does not take, with the reason and the replacement."""
    if (foreign := why_not(name, value)) is not None:
        raise ConfigError(f"{name} {value} is not supported: {foreign.text}", fix=foreign.instead, param=name)


def complete_sources(config: Any) -> None:
    """Add missing sources: a field without a source is an argument if it differs from the default."""
    found: dict[str, Source] = {
        f.name: "default" if getattr(config, f.name) == f.default else "argument" for f in options(config)
    }
    object.__setattr__(config, "sources", {**found, **config.sources})
