"""A start with a broken model folder or on a restricted system: one line, no traceback, no process that waits."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import quire.demo
from quire import logs
from quire.cli.main import main
from quire.config import EngineConfig
from quire.entry import launch
from quire.errors import ConfigError, ModelConfigError, WeightsError
from quire.frontend.tokenizer import Tokenizer
from quire.loader.safetensors import open_checkpoint
from quire.model_config import load_model_config

DEEP = "[" * 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    shutil.copytree(quire.demo.path("target"), tmp_path / "model")
    return tmp_path / "model"


def test_a_tensors_name_does_not_reach_the_terminal_raw(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b]0;owned\x07\x1b[31mweight\u202e\nquire: ready"
    header = json.dumps({name: {"dtype": "F3", "shape": [], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(WeightsError, match="unknown dtype") as error:
        open_checkpoint(folder)
    assert str(error.value).replace("\n", "").isprintable()
    logs.say(error.value.message)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("quire: ")] == lines[:1]


@pytest.mark.parametrize("size", [0, 4, 100, 100_000])
def test_truncated_weights_are_found_before_an_engine_starts(folder: Path, size: int) -> None:
    os.truncate(folder / "model.safetensors", size)
    with pytest.raises(WeightsError, match="truncated"):
        launch.open_model(EngineConfig(model=str(folder)), lambda *report: None)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_deep_nesting_in_the_models_settings(folder: Path, file: str) -> None:
    (folder / file).write_text(DEEP)
    with pytest.raises(ModelConfigError, match=f"{file} cannot be read"):
        load_model_config(folder)


def test_deep_nesting_elsewhere(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tokenizer_config.json").write_text(DEEP)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        Tokenizer.from_folder(folder)
    (tmp_path / "settings.yaml").write_text("port: " + DEEP)
    assert main(["explain", "--config", str(tmp_path / "settings.yaml")]) == 2
    with pytest.raises(SystemExit):
        main(["explain", "--hf-overrides", DEEP])
    assert "not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_pipe_in_place_of_settings(folder: Path, file: str) -> None:
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(ModelConfigError, match=f"{file} is no regular file"):
        load_model_config(folder)


def test_a_pipe_in_place_of_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors is no regular file"):
        open_checkpoint(folder)


def test_a_long_name_of_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unix sockets have names of 107 bytes."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(
        launch,
        "spawn_engine",
        lambda config: subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL),
    )
    handle = launch.EngineProcessHandle(EngineConfig(), tmp_path)
    client = handle.launch()
    try:
        assert handle.socket_folder is not None
        assert sorted(os.listdir(handle.socket_folder)) == ["input", "output"]
    finally:
        client.close()
        handle.kill()
        handle.stop()
    assert not handle.socket_folder.exists()


def limited(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        (limited(resource.RLIMIT_NOFILE, 24), "quire: This process may open too few files. Got 24."),
        # torch's library alone is larger
        (limited(resource.RLIMIT_AS, 400 << 20), "quire: The engine's libraries cannot be loaded: "),
    ],
)
def test_a_system_that_gives_little(limit: Callable[[], None], line: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "quire", "serve", "--port", "0"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit,
    )
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith(line)
