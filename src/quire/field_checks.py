"""Type and range checks of a request's fields. Each raises an InvalidRequestError with the name of the field.

Foreign values are only compared and shortened here, because their repr may be endless.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Final

from quire.errors import InvalidRequestError

MAX_SHOWN_IDS: Final = 16  # an error names this number of wrong ids
ABOVE_ZERO: Final = math.ulp(0.0)  # the smallest positive float, as a lower bound that means "greater than 0"


def plain_int(value: Any) -> Any:
    """Integers of any library as int."""
    if type(value) is not int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return value


def plain_float(value: Any) -> Any:
    """Numbers as float. An int too large for a float stays: the range check refuses it."""
    if type(value) is float or not isinstance(value, numbers.Real) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def plain_list(value: Any, max_count: int) -> Any:
    """A sequence or set as a list without duplicates, with integers as int. Above `max_count`: as a plain list."""
    if not isinstance(value, (list, tuple, set, frozenset, range)):
        return value
    if len(value) > max_count:
        return list(value)
    items = [plain_int(item) for item in value]
    return list(dict.fromkeys(items)) if set(map(type, items)) <= {int, str} else items


def _shown(value: Any) -> Any:
    """The value if its text is short and safe; None leaves it out of the message."""
    if type(value) is int:
        return value if value.bit_length() <= 128 else "an integer of more than 128 bits"
    if type(value) is str:
        return value[:64]
    return value if type(value) in (float, bool) else None


def _wrong_type(name: str, value: Any, expected: str) -> InvalidRequestError:
    kind = type(value).__name__[:64]
    return InvalidRequestError(f"{name} has the wrong type, {kind}", value=_shown(value), expected=expected, param=name)


def check_type(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kind):
        raise _wrong_type(name, value, expected)


def check_int(name: str, value: Any, low: int, high: int) -> None:
    """Check for an int, not a bool, in [low, high]."""
    expected = f"an integer in [{low}, {high}]"
    if type(value) is not int:
        raise _wrong_type(name, value, expected)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is out of range", value=_shown(value), expected=expected, param=name)


def check_float(name: str, value: Any, low: float, high: float) -> None:
    """Check for a finite number in [low, high]; with low = ABOVE_ZERO in ]0, high]."""
    expected = f"a finite number in {'(0' if low == ABOVE_ZERO else f'[{low:g}'}, {high:g}]"
    if type(value) not in (int, float):
        raise _wrong_type(name, value, expected)
    if not low <= value <= high:  # false for NaN
        raise InvalidRequestError(f"{name} is out of range", value=_shown(value), expected=expected, param=name)


def check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(f"{name} has too many entries", value=count, expected=f"at most {limit}", param=name)


def check_strings(name: str, values: Any, max_count: int, max_bytes: int) -> None:
    """Check for a list of at most `max_count` strings of 1 to `max_bytes` bytes of UTF-8."""
    check_type(name, values, list, "a list of strings")
    check_count(name, len(values), max_count)
    for value in values:
        check_type(name, value, str, "strings")
        if not value:
            raise InvalidRequestError(f"{name} contains an empty string", fix="Remove it", param=name)
        try:
            num_bytes = len(value.encode())
        except UnicodeEncodeError:  # a lone surrogate, which JSON can contain
            raise InvalidRequestError(f"{name} contains a string that is not valid Unicode", param=name) from None
        if num_bytes > max_bytes:
            raise InvalidRequestError(
                f"{name} contains a string that is too long",
                value=f"{num_bytes} bytes",
                expected=f"at most {max_bytes}",
                param=name,
            )


def check_token_ids(name: str, ids: Any, max_count: int, vocab_size: int | None) -> None:
    """Check for a list of at most `max_count` integers in [0, vocab_size). None: there is no upper bound."""
    check_type(name, ids, list, "a list of token ids")
    check_count(name, len(ids), max_count)
    high = math.inf if vocab_size is None else vocab_size - 1
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= high):
        return
    wrong = [_shown(token_id) for token_id in ids if type(token_id) is not int or not 0 <= token_id <= high]
    if wrong:
        raise InvalidRequestError(
            f"{name} contains token ids outside the vocabulary",
            value=wrong[0] if len(wrong) == 1 else wrong[:MAX_SHOWN_IDS],
            expected="integers from 0 to below the vocabulary's size"
            if vocab_size is None
            else f"integers in [0, {high}]",
            fix=f"{len(wrong) - MAX_SHOWN_IDS} more are wrong" if len(wrong) > MAX_SHOWN_IDS else None,
            param=name,
        )
