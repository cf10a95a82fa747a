"""How adapters are named on a command line, and which names they may have."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from quire.errors import ConfigError, InvalidRequestError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank, as in vLLM
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+~-]{0,199}", re.ASCII)
NAME = "a letter or digit, then up to 199 letters, digits and . _ : @ / + ~ -"


@dataclass(frozen=True)
class LoraModule:
    """An adapter that a server has from the start.

    Attributes:
        base_model_name: the model that it says to be made for, for `parent` in /v1/models.
    """

    name: str
    path: str
    base_model_name: str | None = None


def is_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, param: str) -> None:
    """Raises InvalidRequestError for a name that no adapter may have."""
    if not is_name(name):
        raise InvalidRequestError("An adapter cannot have this name", value=name, expected=NAME, param=param)


def parse_module(word: str) -> LoraModule:
    """`name=path`, or a JSON object with name, path and maybe base_model_name. Raises ConfigError."""
    if word.startswith("{"):
        try:
            keys = json.loads(word)
        except (ValueError, RecursionError):
            raise _illegal(word) from None
        if not keys.keys() <= {"name", "path", "base_model_name"} or not all(
            isinstance(value, str) or (value is None and name == "base_model_name") for name, value in keys.items()
        ):
            raise _illegal(word)
        module = LoraModule(keys.get("name", ""), keys.get("path", ""), keys.get("base_model_name"))
    else:
        name, _, path = word.partition("=")
        module = LoraModule(name, path)
    if not module.path or not is_name(module.name):
        raise _illegal(word)
    return module


def _illegal(word: str) -> ConfigError:
    return ConfigError(
        "Illegal adapter",
        value=word,
        expected=f'name=path, or {{"name": ..., "path": ..., "base_model_name": ...}}; a name is {NAME}',
        param="lora_modules",
    )
