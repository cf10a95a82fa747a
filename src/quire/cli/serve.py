"""`quire serve [MODEL]`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from quire.cli.flags import Parser
from quire.cli.settings import add_settings_flags, read_settings
from quire.compat.environment import check_environment
from quire.entry.spawn import spawned_engines


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", help="start the OpenAI-compatible server", allow_abbrev=False)
    add_settings_flags(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, args: argparse.Namespace) -> int:
    engine_config, server_config = read_settings(parser, args)
    check_environment(is_strict=server_config.fail_on_environ_validation)
    if engine_config.headless:
        from quire.entry.node import compute_for_node_0

        return compute_for_node_0(engine_config)
    with spawned_engines(engine_config) as interpreters:  # first: it takes longest
        from quire.entry.serve import serve

        return serve(engine_config, server_config, interpreters)
