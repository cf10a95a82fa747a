"""The demo model run in this process under any schedule: the same requests must give the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire.demo


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return Path(quire.demo.path("target"))
