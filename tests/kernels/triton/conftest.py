"""Skips the tests of Triton kernels, with the reason, where such kernels cannot run."""

from __future__ import annotations

import importlib.util

import pytest

from tests import triton_interpreter

# Without Triton the tests cannot even be imported.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _kernels_can_run() -> None:
    if reason := triton_interpreter.why_not():
        pytest.skip(reason)
