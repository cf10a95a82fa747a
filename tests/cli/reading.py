"""Command lines as `quire serve` reads them, up to the configs."""

from __future__ import annotations

from quire.cli.main import build_parser
from quire.cli.settings import read_settings
from quire.config import EngineConfig, ServerConfig


def read(*words: str) -> tuple[EngineConfig, ServerConfig]:
    """The configs of `quire serve WORDS`. Raises ConfigError, or SystemExit for wrong usage."""
    args = build_parser().parse_args(["serve", *words])
    return read_settings(args.run.args[0], args)
