"""`quire serve` over the sabotaged engine, with its own limits: SCRIPT FOLDER ENGINE MAX_FAILURES PATIENCE serve ..."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from quire.cli.main import main
from quire.entry import serve, spawn
from quire.frontend.supervisor import RecoveryLimits

if __name__ == "__main__":
    _, folder, engine, max_failures, patience, *arguments = sys.argv
    spawn.ENGINE_PROGRAM = (str(Path(__file__).with_name("sabotaged_engine.py")), folder, engine)
    limits = RecoveryLimits(
        min_step_seconds=float(patience),
        silence_seconds=float(patience),
        check_seconds=0.05,
        max_failures=int(max_failures),
        good_seconds=0.0 if int(max_failures) > 2 else 600.0,
        max_delay_seconds=0.1,
    )
    serve.start_async_engine = partial(serve.start_async_engine, recovery=limits)  # type: ignore[assignment]
    sys.exit(main(arguments))
