"""`--config FILE`: settings from a YAML file. Its keys are the flags' names; an error names the line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from quire.compat.names import nearest
from quire.compat.table import FOREIGN
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.option import options

# Other flags of a command, such as a workload, belong on the command line.
_SETTINGS = {f.name for config in (EngineConfig, ServerConfig) for f in options(config)} | FOREIGN.keys()


def read_config_file(path: Path, parser: argparse.ArgumentParser, *, only_settings: bool = True) -> dict[str, Any]:
    """The file's settings by name (with underscores), as `parser` would read their flags. Null changes no setting.

    Args:
        only_settings: whether only settings of configs are legal keys, or all flags of the parser.

    Raises:
        ConfigError: the file does not exist or is no YAML mapping, a key is unknown or stands there twice, or a flag
            would refuse its value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file cannot be read: {error}", value=str(path), param="config") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}", param="config") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} holds no settings", expected="lines such as `max-model-len: 8192`", param="config")
    lines: dict[str, int] = {}
    settings = {}
    for key_node, _ in root.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        where = f"{path}, line {line}"
        action = _action(key, parser, where, only_settings=only_settings)
        if action.dest in lines:
            raise ConfigError(
                f"{where}: {key} is given twice", value=f"line {lines[action.dest]}", fix="Remove one", param=key
            )
        lines[action.dest] = line
        if (value := values[key]) is not None:
            settings[action.dest] = converted(value, action, f"{where}: {key}")
    return settings


def _action(key: str, parser: argparse.ArgumentParser, where: str, *, only_settings: bool) -> argparse.Action:
    """The parser's action for a key. Raises ConfigError for an unknown key."""
    name = key.replace("_", "-")
    known = {
        flag.removeprefix("--"): action
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--")
        and not flag.startswith("--no-")
        and (action.dest in _SETTINGS or not only_settings)
        and not isinstance(action, argparse._HelpAction)
    }
    if name == "model-tag":  # the name of the positional argument
        name = "model"
    if name not in known:
        shown = [other for other, action in known.items() if action.help != argparse.SUPPRESS]
        near = nearest(name.removeprefix("--"), shown, known)
        fix = f"Did you mean {near}?" if near else "The keys are the names of the flags: quire serve --help"
        raise ConfigError(f"{where}: unknown setting {key!r}", fix=fix, param=key)
    return known[name]


def converted(value: Any, action: argparse.Action, where: str) -> Any:
    """The value as its flag would read it. The ConfigError for an illegal value says `where` the value stands."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is on or off", value=value, expected="true or false")
        has_both = isinstance(action, argparse.BooleanOptionalAction)
        return value if has_both else action.const if value else action.default
    is_many = action.nargs not in (None, "?")
    try:
        items = [_item(item, action) for item in (value if is_many and isinstance(value, list) else [value])]
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} has an illegal value: {error}", value=value) from None
    if wrong := [item for item in items if action.choices is not None and item not in action.choices]:
        expected = "one of " + ", ".join(map(str, action.choices or ()))
        raise ConfigError(f"{where} has an illegal value", value=wrong[0], expected=expected)
    return items if is_many else items[0]


def _item(value: Any, action: argparse.Action) -> Any:
    if isinstance(value, bool):
        raise TypeError("a text or a number is expected; put quotes around a text")
    text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    return action.type(text) if callable(action.type) else text
