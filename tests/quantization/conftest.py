"""Both paths that read quantized weights."""

from __future__ import annotations

import pytest

from quire.kernels import cpu
from tests.quantization.logits import PATHS


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The plain-torch path, and the compiled kernels."""
    if request.param == "cpu" and not cpu.available():
        pytest.skip("the compiled kernels are not in use")
    monkeypatch.setattr(cpu, "_available", request.param == "cpu")
    return str(request.param)
