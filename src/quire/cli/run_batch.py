"""`quire run-batch [MODEL] -i FILE -o FILE`: answers a file of requests, without a server."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from quire.cli.flags import Parser, Refused, add_config_flags
from quire.cli.settings import add_settings_flags, read_settings
from quire.compat.environment import check_environment
from quire.config import EngineConfig, ServerConfig
from quire.entry.spawn import spawned_engines
from quire.option import options

DESCRIPTION = """
Answers every line of OpenAI's batch format ({"custom_id", "method": "POST", "url", "body"}) from a file into another. A
line that cannot be answered gets an entry with its error. A run that was interrupted is continued by the same command.
"""
SERVER_SETTINGS = (  # settings that a file has too
    *("chat_template", "default_chat_template_kwargs", "response_role", "log_level", "log_format"),
    *("tool_call_parser", "reasoning_parser", "enable_auto_tool_choice", "exclude_tools_when_tool_choice_none"),
    *("enable_per_request_metrics", "return_tokens_as_token_ids", "fail_on_environ_validation"),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run-batch", help="answer a file of requests", description=DESCRIPTION, allow_abbrev=False
    )
    add_settings_flags(parser, (EngineConfig,))
    add_config_flags(parser, ServerConfig, skip=frozenset({f.name for f in options(ServerConfig)} - {*SERVER_SETTINGS}))
    add = parser.add_argument
    add("-i", "--input-file", metavar="FILE", required=True, type=Path, help="JSON lines, one request each")
    add("-o", "--output-file", metavar="FILE", required=True, type=Path, help="JSON lines, in the order of the input")
    add("--disable-tqdm", action=argparse.BooleanOptionalAction, default=False, help="no bars")
    no_port = {"nargs": "*", "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flag in ("--enable-metrics", "--host", "--port"):
        add(flag, action=Refused, why="no port is opened; the bar shows the progress", **no_port)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, args: argparse.Namespace) -> int:
    engine_config, server_config = read_settings(parser, args)
    check_environment(is_strict=server_config.fail_on_environ_validation)
    with spawned_engines(engine_config) as interpreters:  # first: it takes longest
        from quire.entry.run_batch import BatchFiles, run_batch

        files = BatchFiles(args.input_file, args.output_file)
        return run_batch(engine_config, server_config, files, interpreters, is_quiet=args.disable_tqdm)
