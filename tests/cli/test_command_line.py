"""The command line's forms: dashes, short flags, switches with values, parts of JSON objects, misspellings."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.cli.words import plain_words
from quire.config import EngineConfig
from quire.errors import ConfigError
from tests.cli.reading import read

SWITCHES = {"--enable-x", "--no-enable-x", "--other"}


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        (["--max_model_len", "32k"], ["--max-model-len", "32k"]),
        (["--chat_template=a_b"], ["--chat-template=a_b"]),
        (["-O3"], ["-O", "3"]),
        (["-O=3", "-O", "2"], ["-O", "3", "-O", "2"]),
        (["-O.mode=3"], ['-O={"mode": 3}']),
        (["--enable-x", "True", "model"], ["--enable-x", "model"]),
        (["--enable_x", "false"], ["--no-enable-x"]),
        (["--enable-x=true", "--other=FALSE"], ["--enable-x", "--no-other"]),
        (["--value", "true"], ["--value", "true"]),
        (["--watermark=.1", "-0.5", "--x", "a.b"], ["--watermark=.1", "-0.5", "--x", "a.b"]),
        (["--a_b.c.d", "1", "--a-b.c.e=x", "m"], ["m", '--a-b={"c": {"d": 1, "e": "x"}}']),
        (["--a.b+", "1,x", "--a.b+=2"], ['--a={"b": [1, "x", 2]}']),
        (["--", "--a_b"], ["--", "--a_b"]),
    ],
)
def test_plain_words(words: list[str], plain: list[str]) -> None:
    assert plain_words(words, SWITCHES) == plain


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--a.b"], "no value"),
        (["--a.b", "--c"], "no value"),
        (["--a.b", "1", "--a.b.c", "2"], "as a value and as an object"),
        (["--a.b", "1", "--a={}"], "whole and in parts"),
    ],
)
def test_contradictory_parts(words: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        plain_words(words, SWITCHES)


def test_forms_reach_the_config() -> None:
    words = (
        "some/model -tp 1 -O3 -pp=1 -dp 1 --enable_chunked_prefill True --no-enable-prefix-caching --max-model-len auto"
    )
    engine, server = read(*words.split(), "--hf-overrides.a.b", "3", "--served-model-name", "a", "b", "--port=0")
    assert engine.model == "some/model"
    assert (engine.enable_chunked_prefill, engine.enable_prefix_caching) == (True, False)
    assert (engine.max_model_len, engine.hf_overrides) == (-1, {"a": {"b": 3}})
    assert (engine.served_model_name, server.port) == (("a", "b"), 0)


def test_a_switch_whose_name_begins_with_no() -> None:
    for words, is_on in (
        ((), False),
        (("--no-auth",), True),
        (("--no-no-auth",), False),
        (("--no_auth", "true"), True),
    ):
        assert read(*words)[1].no_auth is is_on, words
    assert not read("--no-enable-prefix-caching")[0].enable_prefix_caching


def test_an_endless_drain_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shutdown_timeout. Got inf. Expected a number of seconds, .* not infinite"):
        read("--shutdown-timeout", "inf")


def test_sources_of_flags() -> None:
    engine, server = read("--max-num-seqs", "8", "--enable-prefix-caching", "--port", "8000")
    assert engine.sources["max_num_seqs"] == engine.sources["enable_prefix_caching"] == "flag"
    assert server.sources["port"] == "flag", "a flag that repeats the default is a flag"
    assert engine.sources["block_size"] == server.sources["host"] == "default"


def test_sources_of_arguments() -> None:
    assert EngineConfig(max_num_seqs=8).sources["max_num_seqs"] == "argument"
    assert EngineConfig(max_num_seqs=None).sources["max_num_seqs"] == "default"
    assert EngineConfig(max_num_seqs=8) == EngineConfig(max_num_seqs=8, sources={"max_num_seqs": "flag"})


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--max-model-length=3", "--max-model-len"),
        ("--speculative-modell", "--speculative-model"),
        ("--swapspace", "--swap-space"),
        ("--api_keys", "--api-key"),
    ],
)
def test_misspelt_flag(word: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(word, "1")
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(f"did you mean {near}?")
    assert len(lines) == 2, "an error is one line and a hint, not the whole usage"


def test_two_models() -> None:
    with pytest.raises(ConfigError, match="Two models"):
        read("a/b", "--model", "c/d")
    assert read("a/b", "--model", "a/b")[0].model == "a/b"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str) -> None:
    """As in some daemons. No file that is opened later takes their numbers, and what is written is lost."""
    code = (
        "import os, sys, quire.cli.main as main; code = main.main(['explain', '--vllm', 'vllm serve m']); print(code); "
        "sys.exit(code or min(os.dup(0), 3) - 3)"
    )
    shell = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_command_that_does_not_exist() -> None:
    result = _run("-m", "quire", "preload", "-i", "x")
    assert result.returncode == 2
    assert result.stderr.startswith("quire: error: `quire preload` does not exist: weights are not shared between")


def test_module_path_of_the_guides() -> None:
    result = _run("-m", "quire.entrypoints.openai.api_server", "--model", "x", "--rope-theta", "1")
    assert result.returncode == 2
    notice, error = result.stderr.splitlines()
    assert notice == "quire: this module path is deprecated: use `quire serve MODEL`"
    assert error.startswith("quire: --rope-theta is not supported")


@pytest.mark.parametrize(
    ("name", "command"), [("serving", "serve"), ("throughput", "throughput"), ("latency", "latency")]
)
def test_benchmark_modules_of_the_guides(name: str, command: str) -> None:
    result = _run("-m", f"quire.benchmarks.benchmark_{name}", "--seeed", "100")
    assert result.returncode == 2
    notice, error, _ = result.stderr.splitlines()
    assert notice == f"quire: quire.benchmarks.benchmark_{name} is deprecated: use `quire bench {command}`"
    assert error.startswith(f"quire bench {command}: error: unknown argument '--seeed'; did you mean --seed?")
