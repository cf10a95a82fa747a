"""`quire explain [MODEL] [flags of serve]`: the settings of a server, with their reasons. It loads no weights.

`quire explain --vllm COMMAND`: the answer to each flag of a vLLM command; other servers have such options too.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from quire import logs
from quire.cli.flags import Parser
from quire.cli.settings import add_settings_flags, read_settings
from quire.compat.peers import PEERS
from quire.compat.table import as_flag
from quire.errors import ConfigError

_FOREIGN = ("vllm", *(peer.option for peer in PEERS))
_OWN_ARGUMENTS = ("command", "run", "json", *_FOREIGN)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain", help="show every setting `serve` would start with, and why", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--vllm",
        metavar="COMMAND",
        help="say what becomes of each flag of a vLLM command, and print it for Quire; -: read it from standard input",
    )
    for peer in PEERS:
        what = "FILE" if peer.program is None else "COMMAND"
        subject = "an Ollama Modelfile" if peer.program is None else f"a command of {peer.title}"
        parser.add_argument(as_flag(peer.option), metavar=what, help=f"the same for {subject}")
    parser.secret_names |= set(_FOREIGN)  # they may hold a key
    add_settings_flags(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, args: argparse.Namespace) -> int:
    """Returns the exit code: 0, or 2 if a start would fail because of too little memory."""
    if given := [name for name in _FOREIGN if getattr(args, name) is not None]:
        return _explain_foreign(args, given)
    engine_config, server_config = read_settings(parser, args)
    from quire import extension
    from quire.entry.launch import find_chat_template, find_model
    from quire.metrics.stopwatch import Stopwatch
    from quire.planning.hardware import this_machine
    from quire.screen.explain import explain

    folder, name, model = find_model(engine_config, None, weights=False)
    template = find_chat_template(engine_config, server_config, folder)
    device = this_machine(engine_config.device)
    watch = Stopwatch()
    bandwidth = extension.read_bandwidth(device.num_cores)
    explanation = explain(name, engine_config, server_config, model, device, bandwidth, watch.lap().waited, template)
    if args.json:
        print(json.dumps(explanation.as_dict(), indent=2, default=str))
    else:
        print(explanation.text())
        if explanation.error is not None:
            print(f"\nA start would fail: {explanation.error.message}")
    return 0 if explanation.error is None else 2


def _explain_foreign(args: argparse.Namespace, given: list[str]) -> int:
    """Returns the exit code: 0, or 1 if Quire would not start with these flags."""
    option, *more = given
    other = [name for name, value in vars(args).items() if name not in _OWN_ARGUMENTS and value is not None]
    if other or more:
        raise ConfigError(
            f"{as_flag(option)} explains the flags of its own command, but other flags are given too",
            value=[*more, *other],
            fix="Put all flags into the command",
            param=option,
        )
    logs.configure()
    from quire.cli.explain_vllm import explain_command, explain_peer

    text: str = getattr(args, option)
    peer = next((peer for peer in PEERS if peer.option == option), None)
    if text == "-":
        text = sys.stdin.buffer.read().decode(errors="replace")
    elif peer is not None and peer.program is None:
        text = _read_file(text, option)
    explanation = explain_command(text) if peer is None else explain_peer(text, peer)
    print(json.dumps(explanation.as_dict(), indent=2) if args.json else explanation.text())
    return 0 if explanation.starts else 1


def _read_file(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"The file cannot be read: {error.strerror}", value=path, fix=f"Check {as_flag(option)}", param=option
        ) from None
