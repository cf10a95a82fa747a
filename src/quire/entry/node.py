"""`quire serve --headless`: a machine that computes for machine 0, which serves.

Ray starts it as `python -m quire.entry.node`, with an EngineConfig as one line of JSON on its standard input.
"""

from __future__ import annotations

import logging
import sys
from functools import partial

import msgspec

from quire import extension, logs
from quire.config import EngineConfig
from quire.demo import DEMO_MODEL_NAME
from quire.engine.libraries import load
from quire.engine.rank_spawn import die_with_parent, spawned_ranks
from quire.entry.launch import find_model
from quire.errors import QuireError
from quire.planning import devices
from quire.planning.cut_stages import check_cuts
from quire.planning.replicas import num_early_ranks
from quire.screen.first_screen import show_header
from quire.screen.start_display import StartDisplay


def compute_for_node_0(config: EngineConfig) -> int:
    """Compute until machine 0 ends. Returns exit code 0, or 1 if a rank of this machine was lost.

    Raises ConfigErrors.
    """
    name, device = config.model or DEMO_MODEL_NAME, devices.detect(extension.chosen_isa())
    display = StartDisplay(on_first=partial(show_header, name, device, has_gpu=devices.has_gpu()))
    with spawned_ranks(num_early_ranks(config)) as interpreters:
        try:
            folder, _, model = find_model(config, display.update, weights=True)
        finally:
            display.close()
        check_cuts(model, config)
        run_node = load("quire.engine.node_process").run_node
        exit_code: int = run_node(config, folder, model.drafter_folder, interpreters)
        return exit_code


def main() -> int:
    """Returns the exit code: 2 after an error, which stands on standard error; others: see `compute_for_node_0`."""
    logs.configure()
    die_with_parent()  # Ray may end it at any time
    try:
        return compute_for_node_0(msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig))
    except QuireError as error:
        logs.say(error.message, logging.ERROR, code=error.code)
        return 2


if __name__ == "__main__":
    sys.exit(main())
