"""What several tests of loading share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.certificates import make


@pytest.fixture(scope="session")
def pems(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The certificate of a server on this machine, and its key."""
    return make(tmp_path_factory.mktemp("pems"), "a-store", is_authority=False)
