"""`quire serve [MODEL]`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.flags import add_config_flags, add_foreign_flags, config_from_args
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.logs import configure
from quire.vllm_arguments import drop_foreign


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", help="start the OpenAI-compatible server", allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?", help="folder or hub id of the model; none: the bundled demo model")
    add_config_flags(parser, EngineConfig)
    add_config_flags(parser, ServerConfig)
    add_foreign_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.model_tag is not None:
        if getattr(args, "model", args.model_tag) != args.model_tag:
            raise ConfigError(
                "Two models are named", value=[args.model_tag, args.model], expected="one", fix="Leave --model out"
            )
        args.model = args.model_tag
    configure()
    drop_foreign(vars(args))
    engine_config = config_from_args(EngineConfig, args)
    server_config = config_from_args(ServerConfig, args)
    from quire.serve import serve

    return serve(engine_config, server_config)
