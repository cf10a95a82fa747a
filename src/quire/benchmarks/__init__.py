"""Module paths of vLLM's guides under our package's name. They run the commands that replace them."""

from __future__ import annotations

import sys
from typing import NoReturn

from quire.cli.main import main


def run(module: str, command: str) -> NoReturn:
    """End with the exit code of `quire bench COMMAND` with this process's arguments."""
    print(f"quire: quire.benchmarks.{module} is deprecated: use `quire bench {command}`", file=sys.stderr)
    sys.argv = ["quire", "bench", command, *sys.argv[1:]]
    sys.exit(main())
