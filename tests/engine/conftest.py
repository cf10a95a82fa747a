"""The demo model run in this process under any schedule: the same requests must give the same tokens."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire.demo
from tests.nursery import TorchPopen


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    """Ranks and nodes that are processes are forks.

    A package without `__init__.py` would have the session as scope, so each module has its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", TorchPopen)
        yield


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return Path(quire.demo.path("target"))
