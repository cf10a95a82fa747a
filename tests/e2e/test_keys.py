"""Where keys come from, and where they do not stay: arguments and environments that others can read."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from quire.cli import flags
from quire.cli.main import build_parser
from quire.compat.environment import check_environment
from quire.config import EngineConfig, ServerConfig
from quire.entry import argument_list, spawn
from quire.entry.serve import _api_keys
from quire.errors import ConfigError
from quire.frontend.render_pool import RenderPool

HIDE = """import sys
from quire.entry.argument_list import hide_secrets
hide_secrets(["sesame"])
print(open("/proc/self/cmdline").read().split("\\0")[3:-1], sys.argv[1:])"""


def test_keys_leave_the_list_of_processes() -> None:
    given = ["--api-key", "sesame", "--api-key=sesame", '["sesame", "b"]', "--model", "sesame-street", "x"]
    result = subprocess.run([sys.executable, "-c", HIDE, *given], check=True, capture_output=True, text=True)
    shown = ["--api-key", "******", "--api-key=******", '["******", "b"]', "--model", "sesame-street", "x"]
    assert result.stdout.strip() == f"{shown} {given}"


# Reads a command line like `quire`, and shows the part that others can see.
READ = """import sys
from quire.cli.main import build_parser
build_parser().parse_args()
print(open("/proc/self/cmdline").read().split("\\0")[3:-1])"""


def test_a_command_hides_its_key() -> None:
    words = ["serve", "--api-key", "xyz", "b", "--hf_token=s"]
    result = subprocess.run([sys.executable, "-c", READ, *words], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == str(["serve", "--api-key", "***", "*", "--hf_token=*"])


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["chat", "--api-key", "xyz", "--hf-token", "s"], ["chat", "--api-key", "***", "--hf-token", "*"]),
        (["complete", "--api-key=sesame"], ["complete", "--api-key=******"]),
        (["serve", "--api-key=api"], ["serve", "--api-key=***"]),
        (["serve", "--api-key", "api", "key"], ["serve", "--api-key", "***", "***"]),
        (["bench", "serve", "--header", "A=b", "C=d"], ["bench", "serve", "--header", "***", "***"]),
        (["bench", "serve", "--header=A=b"], ["bench", "serve", "--header=***"]),
        (["bench", "latency", "--hf-token", "s"], ["bench", "latency", "--hf-token", "*"]),
        (["plan", "--hf-token", "s"], ["plan", "--hf-token", "*"]),
        (["explain", "--api-key", "s"], ["explain", "--api-key", "*"]),
    ],
)  # fmt: skip
def test_every_command_hides_what_it_was_given(
    words: list[str], shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that it would write over the arguments of its process."""
    seen: list[str] = []

    def hide(secrets: Collection[str]) -> None:
        seen.extend(os.fsdecode(argument_list._without(secrets, os.fsencode(word))) for word in words)

    monkeypatch.setattr(flags, "hide_secrets", hide)
    build_parser().parse_args(words)
    assert seen == shown


def environment_of(pid: int) -> dict[str, str]:
    """Of a program that may just be starting: before that, the process has its parent's memory."""
    process = psutil.Process(pid)
    while "SEEN" not in (environment := process.environ()):
        assert process.is_running()
        time.sleep(0.01)
    return environment


def test_children_do_not_get_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    monkeypatch.setenv("SEEN", "yes")
    pool = RenderPool({"default": "x"}, {})
    try:
        with spawn.spawned_engines(EngineConfig()) as (engine,):
            processes = [engine.pid, pool._idle._queue[0]._process.pid]
            environments = [environment_of(pid) for pid in processes]
    finally:
        pool.close()
    for environment in environments:
        assert "sesame" not in environment.values()


def test_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-the-environment")
    path = tmp_path / "keys"
    path.write_text("# alice\nkey-a\n\n  key-b  \n")
    path.chmod(0o600)
    file = str(path)
    assert _api_keys(ServerConfig()) == ("from-the-environment",)
    assert _api_keys(ServerConfig(api_key_file=file)) == ("key-a", "key-b")
    assert _api_keys(ServerConfig(api_key=("key-c",), api_key_file=file)) == ("key-c", "key-a", "key-b")
    assert not caplog.records
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        _api_keys(ServerConfig(api_key_file=file))
    assert "chmod 600" in caplog.text
    assert "key-a" not in caplog.text


def test_a_key_file_that_gives_none(tmp_path: Path) -> None:
    """Never a server that is open by mistake."""
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        _api_keys(ServerConfig(api_key_file=str(tmp_path / "none")))
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ConfigError, match="has no key"):
        _api_keys(ServerConfig(api_key_file=str(tmp_path / "empty")))


def test_a_variable_that_looks_like_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "sesame")
    with pytest.raises(ConfigError, match="VLLM_API_KEY") as error:
        check_environment()
    assert "sesame" not in error.value.message
