"""Import it, and the parser of `quire` is made once: each command that a test runs would take a tenth of a second."""

from __future__ import annotations

from functools import cache

from quire.cli import main

main.build_parser = cache(main.build_parser)
main.build_parser()
