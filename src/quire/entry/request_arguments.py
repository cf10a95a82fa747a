"""Arguments of vLLM's methods that all entry points take or refuse in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import UnsupportedFieldError


def refuse(**arguments: Any) -> None:
    """Raise UnsupportedFieldError for arguments that this version does not support, unless they ask for nothing."""
    for name, value in arguments.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(item is not None and item != {} for item in items):
            raise UnsupportedFieldError(f"{name} is not supported in this version", fix=f"Leave {name} out", param=name)


def wants_special_tokens(tokenization_kwargs: Mapping[str, Any] | None, *, default: bool = True) -> bool:
    """The value of add_special_tokens. Raises UnsupportedFieldError for other keys."""
    given = dict(tokenization_kwargs or {})
    add_special_tokens = given.pop("add_special_tokens", default)
    if given:
        raise UnsupportedFieldError(
            "Unsupported tokenization_kwargs",
            value=sorted(given),
            expected="add_special_tokens",
            fix="Tokenize with get_tokenizer() and pass token ids",
            param="tokenization_kwargs",
        )
    return bool(add_special_tokens)
