"""The folder for files that engines keep for later starts, in a run of tests, and the files that begin."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import WAITING

ROOT = Path(__file__).parents[1]
LEFT_OUT = (
    "QUIRE_CACHE_DIR",
    "PYTEST_XDIST_WORKER",
)  # one of several processes imports the kernels, and torch with them


def imported(environment: dict[str, str]) -> Path:
    """The folder of a process that has imported the settings of tests, and has ended."""
    done = subprocess.run(
        [sys.executable, "-c", "import os, tests.conftest; print(os.environ['QUIRE_CACHE_DIR'])"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in LEFT_OUT} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


def test_a_process_removes_no_folder_that_it_was_given(tmp_path: Path) -> None:
    """It is the user's, or other processes of the run still use it."""
    (tmp_path / "kept").touch()
    assert imported({"QUIRE_CACHE_DIR": str(tmp_path)}) == tmp_path
    assert (tmp_path / "kept").exists()


def test_its_own_folder_goes_with_it() -> None:
    assert not imported({}).exists()


def test_files_that_wait_are_there() -> None:
    assert not [name for name in WAITING if not (ROOT / name).exists()]


def test_records_of_our_loggers_are_caught(caplog: pytest.LogCaptureFixture) -> None:
    """See root_logs.py: it would fail here if pytest caught records in another way."""
    logging.getLogger("quire.worker.anything").warning("a warning")
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("quire.worker.anything").debug("a detail")
    assert [record.message for record in caplog.records][:1] == ["a warning"]
