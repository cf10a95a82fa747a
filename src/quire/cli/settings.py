"""The settings of `quire serve`, `explain` and `plan`: flags, a config file, foreign names, and their sources."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from quire import logs
from quire.cli.config_file import read_config_file
from quire.cli.flags import Parser, add_config_flags, add_foreign_flags, config_from_values
from quire.compat.table import as_flag, settle
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.option import Source


def add_settings_flags(
    parser: Parser, configs: tuple[type, ...] = (EngineConfig, ServerConfig), *, models: Literal["?", "*"] = "?"
) -> None:
    """Add MODEL, --config, and a flag for every setting of `configs` and every foreign name.

    Args:
        models: the number of MODELs, in argparse's form.
    """
    parser.usage = f"{parser.prog} [MODEL{' ...' if models == '*' else ''}] [flags]"
    parser.add_argument(
        "model_tag",
        metavar="MODEL",
        nargs=models,
        help="folder, hub id or GGUF file of the model; none: the bundled demo model",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags as keys; the command line wins")
    for config in configs:
        add_config_flags(parser, config)
    add_foreign_flags(parser)


def read_settings(parser: Parser, args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The configs with the source of every value. From now on, logs have the configured form. Raises ConfigErrors."""
    logs.configure()
    given = vars(args) | _model(args)
    layers: list[tuple[Source, Mapping[str, Any]]] = [("flag", given)]
    if args.config is not None:
        layers.insert(0, ("file", read_config_file(Path(args.config), parser)))
    _configure_logs(layers)  # before messages about the other settings
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, layer in layers:
        settled = settle(layer, as_flag)
        values |= settled
        sources |= dict.fromkeys(settled, source)
    return config_from_values(EngineConfig, values, sources), config_from_values(ServerConfig, values, sources)


def _configure_logs(layers: list[tuple[Source, Mapping[str, Any]]]) -> None:
    given = {name: layer[name] for name in ("log_level", "log_format") for _, layer in layers if name in layer}
    form = ServerConfig(**given)
    logs.configure(form.log_level, form.log_format)


def _model(args: argparse.Namespace) -> dict[str, str]:
    if args.model_tag is None:
        return {}
    if getattr(args, "model", args.model_tag) != args.model_tag:
        raise ConfigError(
            "Two models are named", value=[args.model_tag, args.model], expected="one", fix="Leave --model out"
        )
    return {"model": args.model_tag}
