"""`python -m quire`: the same as the `quire` command."""

from __future__ import annotations

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
