"""Command-line flags made from the config dataclasses: one definition for flags, LLM(...) arguments and docs."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from typing import Any, NoReturn, TypeVar, get_type_hints

from quire.config import field_type
from quire.errors import ConfigError
from quire.vllm_arguments import NEUTRAL, NO_EFFECT, flag_type

C = TypeVar("C")


class Parser(argparse.ArgumentParser):
    """Errors name the nearest known flag; underscores in flag names are accepted as dashes (as vLLM does)."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        parsed, unknown = self.parse_known_args([_dashes(word) for word in words], namespace)
        if unknown:
            self._unknown(unknown[0])
        return parsed

    def _unknown(self, word: str) -> NoReturn:
        known: set[str] = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    known |= set(parser._option_string_actions)
        near = difflib.get_close_matches(word.split("=")[0], known, 1)
        self.error(f"unknown argument {word!r}" + (f"; did you mean {near[0]}?" if near else ""))


def _dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def _converter(convert: Any) -> Any:
    """Wrap a converter so that its ConfigError becomes argparse's one-line error."""

    def wrapped(text: str) -> Any:
        try:
            return convert(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message) from None

    return wrapped


def add_config_flags(parser: argparse.ArgumentParser, config: type, *, skip: frozenset[str] = frozenset()) -> None:
    """One flag per field of `config`; booleans get --name and --no-name."""
    group = parser.add_argument_group(config.__name__)
    hints = get_type_hints(config)
    for f in dataclasses.fields(config):
        if f.name in skip:
            continue
        names = ["--" + f.name.replace("_", "-"), *f.metadata["flags"]]
        base, is_many, _ = field_type(hints[f.name])
        options: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": _help(f)}
        if base is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            wanted = f.metadata["type"]
            options["type"] = _json_object if wanted == "json" else _converter(wanted or base)
            if f.metadata["choices"]:
                options["choices"] = f.metadata["choices"]
            if is_many:
                options["nargs"] = "+"
        group.add_argument(*names, **options)


def _help(f: dataclasses.Field[Any]) -> str:
    default: str = "" if f.default in (None, (), False) else f" (default: {f.default})"
    return (str(f.metadata["help"]) + default).replace("%", "%%")


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """vLLM's flags without a setting here: not in the help, and known, so that command lines written for vLLM run."""
    for name in sorted(NO_EFFECT.keys() | NEUTRAL.keys()):
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        kind = flag_type(name)
        options |= {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": _converter(kind)}
        parser.add_argument("--" + name.replace("_", "-"), **options)


def config_from_args(config: type[C], args: argparse.Namespace) -> C:
    """The dataclass from the flags that were given; the rest keeps its default."""
    names = {f.name for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    return config(**{name: value for name, value in vars(args).items() if name in names})
