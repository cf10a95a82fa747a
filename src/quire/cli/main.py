"""`quire`: parse the command line and hand over to the subcommand."""

from __future__ import annotations

import logging
import os
import sys

from quire import __version__, logs
from quire.cli import bench, chat, collect_env, complete, explain, plan, quality, quantize, serve
from quire.cli.flags import Parser
from quire.errors import ConfigError, QuireError

COMMANDS = (serve, chat, complete, bench, plan, explain, quality, quantize, collect_env)


def build_parser() -> Parser:
    parser = Parser(
        prog="quire", description="Fast LLM inference and serving that needs no tuning.", allow_abbrev=False
    )
    parser.add_argument("-v", "--version", action="version", version=f"quire {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted."""
    args = build_parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except QuireError as error:
        logs.say(error.message, logging.ERROR, code=error.code)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the terminal has written ^C
        logs.say("interrupted")
        return 130
    except BrokenPipeError:  # whoever read the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 1


if __name__ == "__main__":
    sys.exit(main())
