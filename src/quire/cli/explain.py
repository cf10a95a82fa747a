"""`quire explain [MODEL] [flags of serve]`: what a server would start with, and why. Loads no weights."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from quire.cli.flags import Parser
from quire.cli.settings import add_settings_flags, read_settings


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain", help="show every setting `serve` would start with, and why", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings_flags(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, args: argparse.Namespace) -> int:
    """Exit code 0, or 2 if a start would fail for lack of memory."""
    engine_config, server_config = read_settings(parser, args)
    from quire.entry.launch import find_model
    from quire.kernels import extension
    from quire.metrics.stopwatch import Stopwatch
    from quire.planning import devices
    from quire.screen.explain import explain

    _, name, model = find_model(engine_config, None, weights=False)
    gpu = "none was looked for" if engine_config.device == "cpu" else devices.ask_gpu()
    device = devices.detect(extension.chosen_isa(), gpu)
    watch = Stopwatch()
    bandwidth = extension.read_bandwidth(device.num_cores)
    explanation = explain(name, engine_config, server_config, model, device, bandwidth, watch.lap().waited)
    if args.json:
        print(json.dumps(explanation.as_dict(), indent=2, default=str))
    else:
        print(explanation.text())
        if explanation.error is not None:
            print(f"\nA start would fail: {explanation.error.message}")
    return 0 if explanation.error is None else 2
