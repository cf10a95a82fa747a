"""Command lines as `quire serve` reads them, up to the configs."""

from __future__ import annotations

from functools import cache

from quire.cli.flags import Parser
from quire.cli.main import build_parser
from quire.cli.settings import read_settings
from quire.config import EngineConfig, ServerConfig


@cache
def _parser() -> Parser:
    return build_parser()


def read(*words: str) -> tuple[EngineConfig, ServerConfig]:
    """The configs of `quire serve WORDS`. Raises ConfigError, or SystemExit for wrong usage."""
    args = _parser().parse_args(["serve", *words])
    return read_settings(args.run.args[0], args)
