"""The HTTP side starts without the heavy libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_server_and_metrics_load_neither_torch_nor_transformers():
    program = (
        "import sys, quire.server.app, quire.server.beam_search, quire.metrics.prometheus\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    source = Path(__file__).parents[2] / "src"
    output = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
