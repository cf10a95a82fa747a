"""`--config FILE`: the flags' names as keys, the command line above it, and errors that name the line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from tests.cli.reading import read

GOOD = """\
# as vLLM's
model: some/model
max-model-len: 32k
max_num_seqs: 8
gpu-memory-utilization: 0.5
enable-prefix-caching: false
served-model-name: [a, b]
hf-overrides:
  rope_parameters: {factor: 2.0}
api-key: secret
port: 0
revision: 1.0
quantization: null
"""


def _read(tmp_path: Path, text: str, *words: str) -> tuple[EngineConfig, ServerConfig]:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return read("--config", str(path), *words)


def test_values(tmp_path: Path) -> None:
    engine, server = _read(tmp_path, GOOD)
    assert (engine.model, engine.max_model_len, engine.max_num_seqs) == ("some/model", 32000, 8)
    assert (engine.gpu_memory_utilization, engine.enable_prefix_caching) == (0.5, False)
    assert (engine.served_model_name, engine.hf_overrides) == (("a", "b"), {"rope_parameters": {"factor": 2.0}})
    assert (server.api_key, server.port, engine.revision) == (("secret",), 0, "1.0")
    assert engine.quantization is None
    assert engine.sources["max_num_seqs"] == server.sources["port"] == "file"
    assert engine.sources["quantization"] == "default"


def test_the_command_line_wins(tmp_path: Path) -> None:
    engine, _ = _read(tmp_path, GOOD, "other/model", "--max-num-seqs", "3", "--enable-prefix-caching")
    assert (engine.model, engine.max_num_seqs, engine.enable_prefix_caching) == ("other/model", 3, True)
    assert engine.sources["max_num_seqs"] == "flag"
    assert engine.sources["max_model_len"] == "file"


def test_foreign_keys_are_answered_as_flags(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine, _ = _read(tmp_path, "swap-space: 4\nmax-num-active-seqs: 5\nenable-lora: false\n")
    assert engine.max_num_seqs == 5
    assert engine.sources["max_num_seqs"] == "file"
    assert "--swap-space has no effect" in caplog.text
    with pytest.raises(ConfigError, match="--rope-theta is not supported"):
        _read(tmp_path, "rope-theta: 10000\n")


def test_empty_file(tmp_path: Path) -> None:
    assert _read(tmp_path, "# nothing\n") == read()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "port: 1\nmax-model-length: 5\n",
            ("line 2: unknown setting 'max-model-length'", "Did you mean max-model-len?"),
        ),
        ("--port: 1\n", ("line 1: unknown setting '--port'", "Did you mean port?")),
        ("config: x\n", ("line 1: unknown setting 'config'",)),
        ("port: 1\n\nport: 2\n", ("line 3: port is given twice", "line 1")),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", ("line 2: max_num_seqs is given twice",)),
        ("port: eight\n", ("line 1: port has an illegal value",)),
        ("max-model-len: 1.5x\n", ("line 1: max-model-len has an illegal value", "Not a number")),
        ("enable-prefix-caching: 'yes'\n", ("line 1: enable-prefix-caching is on or off", "true or false")),
        ("served-model-name: on\n", ("line 1: served-model-name has an illegal value", "put quotes around a text")),
        ("- a\n- b\n", ("holds no settings",)),
        ("port: [1\n", ("is not valid YAML",)),
        ("port: !!python/object/apply:os.system ['true']\n", ("is not valid YAML",)),
    ],
)
def test_errors(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(tmp_path, text)
    for part in parts:
        assert part in caught.value.message


def test_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read("--config", str(tmp_path / "none.yaml"))
