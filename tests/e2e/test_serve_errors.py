"""Starts that cannot succeed: exit code 2, one readable line with advice, and the advice works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from quire import demo
from quire.cli.main import main
from quire.entry import spawn
from tests.e2e.serving import LIGHT, LIGHT_ENGINE, QUIRE, Program, Serve, quire
from tests.nursery import LightPopen

THREADS = ("--num-threads", "1")


def _refused(*flags: str, program: Program = QUIRE) -> str:
    """The error of a refused start, without its progress: a line or two."""
    result = quire("serve", "--port", "0", *THREADS, *flags, program=program)
    return _one_message(result.returncode, result.stderr)


def _one_message(code: object, said: str) -> str:
    assert code == 2, said
    message = [line for line in said.splitlines() if not line.startswith("  ")]
    assert 1 <= len(message) <= 2, said
    assert all(line.startswith("quire") for line in message), said
    return " ".join(message)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("/no/such/folder",), ("/no/such/folder",)),
        (("--no-such-flag",), ("--no-such-flag",)),
        (("--max-model-lenn", "100"), ("--max-model-lenn", "--max-model-len")),
        (("--max-model-len", "4096"), ("max_model_len", "2048", "--max-model-len")),
        (("--dtype", "int3"), ("int3", "bfloat16")),
        (("--host", "0.0.0.0"), ("0.0.0.0", "--api-key", "--no-auth")),
        (("--port", "70000"), ("70000", "65535")),
        (("--chat-template", "./no-such.jinja"), ("no-such.jinja",)),
        (("--default-chat-template-kwargs", '{"messages": []}'), ("default_chat_template_kwargs", "'messages'")),
        (("--default-chat-template-kwargs", '{"budget": NaN}'), ("default_chat_template_kwargs", "finite numbers")),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "32"), ("--max-num-seqs", "--max-num-batched-tokens")),
        (("some/model", "--model", "another/model"), ("some/model", "another/model")),
    ],
)
def test_refused_starts(
    flags: tuple[str, ...],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process; those below are processes of their own."""
    monkeypatch.setattr(spawn, "ENGINE_PROGRAM", (LIGHT_ENGINE,))
    monkeypatch.setattr("subprocess.Popen", LightPopen)
    try:
        code: object = main(["serve", "--port", "0", *THREADS, *flags])
    except SystemExit as end:  # the parser's
        code = end.code
    message = _one_message(code, capsys.readouterr().err)
    for word in words:
        assert word in message


def test_a_template_that_is_none() -> None:
    """Found when the client of the engine is there already: the end of the process closes it."""
    assert "Jinja" in _refused("--chat-template", "{% if %}", program=LIGHT)


def test_broken_checkpoints(tmp_path: Path) -> None:
    """The engine process finds faults of the weights, and the server reports them."""
    for file in demo.path().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    message = _refused(str(tmp_path))
    assert "model.safetensors" in message
    weights.unlink()
    assert "safetensors" in _refused(str(tmp_path))
    (tmp_path / "config.json").unlink()
    assert "config.json" in _refused(str(tmp_path))


def test_advice_on_too_little_memory_works() -> None:
    """Every command line that the message advises starts."""
    small = ("--kv-cache-memory-bytes", "1M", "--dtype", "float32")
    message = _refused(*small, program=LIGHT)
    assert "missing" in message
    advice = re.split("Use one of: ", message)[1].rstrip(".").split("; ")
    advised = [shlex.split(re.sub(r" \(.*\)", "", item)) for item in advice]
    assert {flags[0] for flags in advised} == {"--max-model-len", "--kv-cache-memory-bytes"}
    for flags in advised:
        with Serve(*THREADS, *small, *flags, program=LIGHT) as server:
            assert server.stop() == 0


def test_largest_context_that_fits() -> None:
    """--max-model-len -1 is cut to the cache; 1 MiB holds 10 blocks of 16 tokens in float32."""
    flags = ("--kv-cache-memory-bytes", "1M", "--dtype", "float32", "--max-model-len", "-1")
    with Serve(*THREADS, *flags, program=LIGHT) as server:
        assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 160
        assert server.stop() == 0
