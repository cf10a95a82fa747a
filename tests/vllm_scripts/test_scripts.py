"""A script of each kind of vLLM's offline examples runs after its import is changed, on the demo model."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import quire.demo
from tests.nursery import TorchPopen

SCRIPTS = Path(__file__).parent
MODEL = str(quire.demo.path())

Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script -> the lines that it prints."""

    def runs(name: str, *arguments: str) -> list[str]:
        text, count = re.subn(r"^(from|import) vllm\b", r"\1 quire", (SCRIPTS / name).read_text(), flags=re.MULTILINE)
        assert count, "the script imports nothing of vLLM"
        script = tmp_path / name
        script.write_text(text)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        monkeypatch.setattr("subprocess.Popen", TorchPopen)
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return runs


def test_basic(run: Run) -> None:
    lines = run("basic.py", MODEL)
    assert [line.split(", text")[0] for line in lines] == [
        "Prompt: 'How do you list files?'",
        "Prompt: 'What is the capital of France?'",
    ]


def test_generate(run: Run) -> None:
    assert run("generate.py", "--model", MODEL, "--max_tokens=3", "--enforce-eager") == ["3 256 True"]


def test_chat(run: Run) -> None:
    lines = run("chat.py", "--model", MODEL, "--max-num-seqs", "4")
    assert len(lines) == 5
    assert len(set(lines[:4])) == 1, "a batch answers otherwise than one conversation"
    assert lines[4].startswith("Prompt: 'list_files How do you list files?'")


def test_prefix_caching(run: Run) -> None:
    is_same, first, second, after_reset = run("prefix_caching.py", MODEL)
    assert is_same == "True"
    assert first == after_reset == "0"
    assert int(second) > 100


def test_metrics(run: Run) -> None:
    lines = run("metrics.py", MODEL)
    assert "vllm:generation_tokens (counter) = 10" in lines
    assert "vllm:num_requests_running (gauge) = 0.0" in lines
    assert any(line.startswith("vllm:request_generation_tokens (histogram) = 10.0 in 2, ") for line in lines)
    (accepted,) = [line for line in lines if "(vector)" in line]
    assert re.fullmatch(r"vllm:spec_decode_num_accepted_tokens_per_pos \(vector\) = \[\d+, \d+\]", accepted)


def test_async_streaming(run: Run) -> None:
    assert sorted(run("async_streaming.py", MODEL)) == ["aborted", "stream-0: 6 tokens", "stream-1: 6 tokens"]


def test_llm_engine(run: Run) -> None:
    lines = run("llm_engine.py", "--model", MODEL)
    assert sorted(lines) == [
        "request 0 of 'How do you list files?' has ended",
        "request 1 of 'Hello' has ended",
        "request 2 of 'What is a file?' has ended",
    ]


def test_structured_outputs(run: Run) -> None:
    mood, date, car, query, guided = map(ast.literal_eval, run("structured_outputs.py", MODEL))
    assert mood in ("Positive", "Negative")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    assert set(json.loads(car)) == {"doors", "kind"}
    assert re.fullmatch(r"SELECT col_[12] from table_[12]", query)
    assert guided in ("yes", "no")


def test_multilora(run: Run) -> None:
    base, adapted, other = run("multilora.py", MODEL, str(quire.demo.path("lora")))
    assert base != adapted == other
