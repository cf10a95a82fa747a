"""Command-line flags made from the config dataclasses: one definition for flags, LLM(...) arguments and docs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, get_type_hints

from quire.cli.words import plain_words
from quire.compat.commands import absent_command
from quire.compat.foreign import Foreign
from quire.compat.names import nearest
from quire.compat.table import FOREIGN, SHORT_FLAGS, as_flag
from quire.entry.argument_list import hide_secrets
from quire.errors import ConfigError
from quire.option import Source, field_type, options

C = TypeVar("C")


class Parser(argparse.ArgumentParser):
    """Reads command lines like vLLM's parser (`plain_words`). An error is one line, and names the nearest known flag.

    The values of arguments in `secret_names` are removed from the list of processes as soon as they are read.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.secret_names: set[str] = set()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        parser = self._chosen(words)
        try:
            words = plain_words(words, parser.switches)
        except ConfigError as error:
            parser.error(error.message)
        parsed, unknown = self.parse_known_args(words, namespace)
        hide_secrets(parser._secrets(parsed))
        prompt = getattr(parsed, "prompt", None)
        if isinstance(prompt, list) and not any(word.startswith("-") for word in unknown):
            prompt += unknown  # argparse has no place for words on both sides of a flag
        elif unknown:
            parser._unknown(next((word for word in unknown if word.startswith("-")), unknown[0]))
        return parsed

    def _secrets(self, parsed: argparse.Namespace) -> list[str]:
        values = [getattr(parsed, name, None) or [] for name in self.secret_names]
        return [secret for value in values for secret in ([value] if isinstance(value, str) else value)]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists what there is.\n")

    @property
    def switches(self) -> set[str]:
        """The flags that take no value."""
        actions = self._option_string_actions.items()
        return {flag for flag, action in actions if isinstance(action, argparse.BooleanOptionalAction)}

    def _chosen(self, words: list[str]) -> Parser:
        """The parser of the subcommand that is called, or this parser."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                at = next((i for i, word in enumerate(words) if not word.startswith("-")), None)
                if at is None:
                    return self
                if (absent := absent_command(words[at])) is not None:
                    self.error(absent)
                chosen = dict(action.choices).get(words[at], self)
                assert isinstance(chosen, Parser)
                return self if chosen is self else chosen._chosen(words[at + 1 :])
        return self

    def nearest_flag(self, word: str) -> str | None:
        """The known flag that is most like an unknown one."""
        actions = self._option_string_actions.items()
        shown = [flag for flag, action in actions if action.help != argparse.SUPPRESS]
        return nearest(word.split("=")[0], shown, [flag for flag, _ in actions])

    def _unknown(self, word: str) -> NoReturn:
        near = self.nearest_flag(word)
        self.error(f"unknown argument {word!r}" + (f"; did you mean {near}?" if near else ""))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
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


class Switch(argparse.BooleanOptionalAction):
    """The flags --name and --no-name, also for a name that begins with `no`, for example --no-auth."""

    def is_on(self, flag: str) -> bool:
        """Whether a spelling of the flag turns the setting on."""
        return not (flag.startswith("--no-") and f"--{flag.removeprefix('--no-')}" in self.option_strings)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert option_string is not None, "it is no positional argument"
        setattr(namespace, self.dest, self.is_on(option_string))


class Refused(argparse.Action):
    """A flag that vLLM's command has and ours lacks. Its error has the reason."""

    def __init__(self, *args: Any, why: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._why = why

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.error(f"{option_string} is not supported: {self._why}")


def add_config_flags(parser: argparse.ArgumentParser, config: type, *, skip: frozenset[str] = frozenset()) -> None:
    """Add a flag for each field of `config`. Booleans get --name and --no-name."""
    group = parser.add_argument_group(config.__name__)
    hints = get_type_hints(config)
    for f in options(config):
        if f.name in skip:
            continue
        if f.metadata["secret"] and isinstance(parser, Parser):
            parser.secret_names.add(f.name)
        names = ["--" + f.name.replace("_", "-"), *f.metadata["flags"]]
        base, is_many, _ = field_type(hints[f.name])
        keywords: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": _help(f)}
        if base is bool:
            keywords["action"] = Switch
        else:
            wanted = f.metadata["type"]
            keywords["type"] = _json_object if wanted == "json" else _converter(wanted or base)
            if f.metadata["choices"]:  # checked by the config, which knows vLLM's choices too
                keywords["metavar"] = "{" + ",".join(f.metadata["choices"]) + "}"
            if is_many:
                keywords["nargs"] = "+"
        group.add_argument(*names, **keywords)


def _help(f: dataclasses.Field[Any]) -> str:
    default: str = "" if f.default in (None, (), False) else f" (default: {f.default})"
    return (str(f.metadata["help"]) + default).replace("%", "%%")


def add_foreign_flags(parser: argparse.ArgumentParser, foreign: Iterable[Foreign] = FOREIGN.values()) -> None:
    """Add vLLM's flags without a setting here, so that command lines for vLLM run. The help does not show them."""
    for entry in foreign:
        name = entry.name
        keywords: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if entry.shape == "switch":
            keywords["action"] = Switch
        else:
            keywords |= {"type": str, "nargs": "*" if entry.shape == "list" else None}
        parser.add_argument(as_flag(name), *SHORT_FLAGS.get(name, ()), **keywords)


def config_from_values(config: Callable[..., C], values: dict[str, Any], sources: dict[str, Source]) -> C:
    """A config with the given settings. All other settings have their defaults. Raises ConfigError."""
    names = {f.name for f in options(config)} & values.keys()
    return config(**{name: values[name] for name in names}, sources={name: sources[name] for name in names})
