"""`--config FILE`: settings from a YAML file. Its keys are the flags' names; what is wrong is named with its line."""

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

# What a command has beside these, such as a workload, belongs on the command line.
_SETTINGS = {f.name for config in (EngineConfig, ServerConfig) for f in options(config)} | FOREIGN.keys()


def read_config_file(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The file's settings by name (with underscores), as `parser` would read their flags. Null leaves a setting alone.

    Raises:
        ConfigError: no such file, no YAML mapping, an unknown key, a key given twice, or a value its flag would refuse.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file cannot be read: {error}", value=str(path), param="config") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}", param="config") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} holds no settings", expected="lines such as `max-model-len: 8192`", param="config")
    lines: dict[str, int] = {}
    settings = {}
    for key_node, _ in root.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        where = f"{path}, line {line}"
        action = _action(key, parser, where)
        if action.dest in lines:
            raise ConfigError(
                f"{where}: {key} is given twice", value=f"line {lines[action.dest]}", fix="Remove one", param=key
            )
        lines[action.dest] = line
        if (value := values[key]) is not None:
            settings[action.dest] = converted(value, action, f"{where}: {key}")
    return settings


def _action(key: str, parser: argparse.ArgumentParser, where: str) -> argparse.Action:
    """What the parser does for a key."""
    name = key.replace("_", "-")
    known = {
        flag.removeprefix("--"): action
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--") and not flag.startswith("--no-") and action.dest in _SETTINGS
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
    """The value as its flag would have read it. Raises ConfigError, which says `where` it stands."""
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is on or off", value=value, expected="true or false")
        return value
    try:
        if action.nargs is not None:
            return [_item(item, action) for item in (value if isinstance(value, list) else [value])]
        return _item(value, action)
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} has an illegal value: {error}", value=value) from None


def _item(value: Any, action: argparse.Action) -> Any:
    if isinstance(value, bool):
        raise TypeError("a text or a number is expected; put quotes around a text")
    text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    assert callable(action.type)
    return action.type(text)
