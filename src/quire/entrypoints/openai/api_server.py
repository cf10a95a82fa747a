"""`python -m quire.entrypoints.openai.api_server`: the module path of all guides; the same as `quire serve`."""

from __future__ import annotations

import sys

from quire.cli.main import main

if __name__ == "__main__":
    print("quire: this module path is deprecated: use `quire serve MODEL`", file=sys.stderr)
    sys.exit(main(["serve", *sys.argv[1:]]))
