"""The sanitized build finds faults of memory. Runs in `make test-sanitize` only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif("QUIRE_SANITIZED" not in os.environ, reason="make test-sanitize")

WRITE_TOO_FAR = """
from tests import other_extension
import torch
from quire.kernels import cpu
cpu.gemm_pack(torch.zeros(65, 32), torch.zeros(64, 32))
"""


def test_a_write_behind_the_end_ends_the_process() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", WRITE_TOO_FAR], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
