"""EngineArgs: the settings of an engine as vLLM's scripts make them, from arguments or from a command line."""

from __future__ import annotations

import argparse
from typing import Any, TypeVar

from quire.cli.flags import add_config_flags, add_foreign_flags
from quire.compat.engine_flags import ENGINE_FLAGS
from quire.config import EngineConfig
from quire.option import options

A = TypeVar("A", bound="EngineArgs")
P = TypeVar("P", bound=argparse.ArgumentParser)


class EngineArgs(EngineConfig):
    """An EngineConfig that also takes vLLM's other names, as LLM(...) does. Raises ConfigError for an unknown name."""

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        super().__init__(**vars(EngineConfig.from_kwargs(model=model, **kwargs)))

    @staticmethod
    def add_cli_args(parser: P, async_args_only: bool = False) -> P:
        """Add a flag for every setting and for vLLM's other engine flags. Returns the parser.

        Args:
            parser: a FlexibleArgumentParser, or a parser of argparse, which does not know spellings such as
                `--max_num_seqs`.
            async_args_only: whether to add only flags of the asynchronous engine. There are none.
        """
        if not async_args_only:
            add_config_flags(parser, EngineConfig)
            add_foreign_flags(parser, ENGINE_FLAGS)
            parser.set_defaults(**{f.name: f.default for f in options(EngineConfig)})  # scripts read them all
        return parser

    @classmethod
    def from_cli_args(cls: type[A], args: argparse.Namespace) -> A:
        """The settings from parsed arguments. Arguments that are not from add_cli_args() are ignored.

        Raises ConfigErrors.
        """
        known = {f.name for f in options(cls)} | {entry.name for entry in ENGINE_FLAGS}
        return cls(**{name: value for name, value in vars(args).items() if name in known})
