"""JSON objects of a checkpoint folder, in transformers' form."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from quire.errors import ModelConfigError

# transformers 5 writes numbers that JSON does not have as {"__float__": "Infinity"}.
_FLOAT_TAG = "__float__"
_TAGGED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_object(path: Path, *, required: bool) -> dict[str, Any]:
    """The object in a file; an empty one if the file is absent and not required.

    Raises ModelConfigError: the file is missing, unreadable, or holds no JSON object.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait
            raise ModelConfigError(f"{path} is no regular file", fix="Put the file itself there")
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_untagged)
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelConfigError(
            f"{path} does not exist",
            expected="the folder of a Hugging Face checkpoint",
            fix="Check the model's folder or hub id",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}", fix="Download the file again") from None
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} does not hold a JSON object", value=value, expected="an object of settings")
    return value


def _untagged(value: dict[str, Any]) -> dict[str, Any] | float:
    tag = value.get(_FLOAT_TAG)
    return _TAGGED_FLOATS[tag] if len(value) == 1 and isinstance(tag, str) and tag in _TAGGED_FLOATS else value
