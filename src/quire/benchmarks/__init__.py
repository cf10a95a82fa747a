"""Module paths of vLLM's guides under our package's name, refused with what takes their place."""

from __future__ import annotations

import sys
from typing import NoReturn

from quire.compat.commands import absent_command


def refuse(module: str, command: str) -> NoReturn:
    """End with exit code 2 and one line: what `python -m quire.benchmarks.MODULE` is now, and since when not."""
    print(f"quire: quire.benchmarks.{module} is `{command}`. {absent_command('bench')}", file=sys.stderr)
    sys.exit(2)
