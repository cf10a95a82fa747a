"""Brings command lines that people write for vLLM into the form that argparse reads."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from quire.errors import ConfigError

_TRUTH = {"true": "--", "false": "--no-"}


def plain_words(words: list[str], switches: Collection[str]) -> list[str]:
    """The same command line in plain words.

    `--max_model_len` becomes `--max-model-len`, `-O3` becomes `-O 3`, and `--switch True` becomes `--switch` (or
    `--no-switch`). All `--json-flag.key value` of a flag become one JSON object.

    Args:
        switches: the flags without a value, with their leading dashes.

    Raises:
        ConfigError: a dotted flag has no value, or the same flag with a whole object stands beside it.
    """
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            plain += [word, *rest]
        elif any(char.isspace() for char in word.partition("=")[0]):
            plain.append(word)  # a whole command line, as `explain --vllm` takes it: flags have no blanks
        elif word.startswith("-O") and len(word) > 2 and word[2] != ".":
            plain += ["-O", word[2:].removeprefix("=")]
        elif _is_dotted(word):
            _collect(word, rest, objects)
        elif word.startswith("--"):
            plain.append(_dashes(word))
        elif plain and plain[-1] in switches and word.lower() in _TRUTH:
            plain[-1] = _TRUTH[word.lower()] + plain[-1].removeprefix("--")
        else:
            plain.append(word)
    plain = [_without_value(word, switches) for word in plain]
    for flag, value in objects.items():
        if any(word == flag or word.startswith(flag + "=") for word in plain):
            raise ConfigError(f"{flag} is given both as a whole and in parts", fix=f"Write all of it into one {flag}")
        plain.append(f"{flag}={json.dumps(value)}")
    return plain


def _dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _without_value(word: str, switches: Collection[str]) -> str:
    """`--switch` in place of `--switch=true`, and `--no-switch` in place of `--switch=false`."""
    name, equals, value = word.partition("=")
    if equals and name in switches and value.lower() in _TRUTH:
        return _TRUTH[value.lower()] + name.removeprefix("--")
    return word


def _is_dotted(word: str) -> bool:
    """Whether a word is a dotted flag: `--hf-overrides.rope_theta` and `-O.mode` are, `-0.5` and `--a=.1` are not."""
    name = word.partition("=")[0]
    return "." in name and (name.startswith("--") or (name[:1] == "-" and name[1:2].isalpha()))


def _collect(word: str, rest: Iterator[str], objects: dict[str, dict[str, Any]]) -> None:
    name, equals, text = word.partition("=")
    if not equals:
        text = next(rest, "")
        if not text or text.startswith("--"):
            raise ConfigError(f"{name} has no value", expected=f"{name} VALUE, or {name}=VALUE")
    flag, *keys = name.split(".")
    target = objects.setdefault(_dashes(flag) if flag.startswith("--") else flag, {})
    for key in keys[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{name} is given as a value and as an object", value=inner)
        target = inner
    last = keys[-1]
    if last.endswith("+"):  # vLLM's form for elements of a list
        target.setdefault(last[:-1], []).extend(_json(item) for item in text.split(","))
    else:
        target[last] = _json(text)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
