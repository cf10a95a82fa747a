"""Fixtures of the kernel tests: run on each instruction set of this CPU, change the number of threads, and put it
back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from quire.kernels import cpu


@pytest.fixture(params=cpu.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set this CPU can run, active during the test. Without the extension the test is skipped."""
    before = cpu.isa()
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(before)


@pytest.fixture
def set_num_threads() -> Iterator[Callable[[int], None]]:
    before = cpu.get_num_threads()
    yield cpu.set_num_threads
    cpu.set_num_threads(before)
