"""`quire explain` for other servers: each flag becomes an existing setting, and texts are read as they are pasted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli import explain_vllm
from quire.cli.explain_vllm import explain_peer
from quire.cli.main import main
from quire.cli.peers_page import render
from quire.compat.peers import PEERS, Peer, PeerFlag
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.option import options

ROOT = Path(__file__).parents[2]
BY_TITLE = {peer.title: peer for peer in PEERS}
SETTINGS = {f.name for config in (EngineConfig, ServerConfig) for f in options(config)}
VALUES: dict[str, Any] = {"--speculative-algorithm": "NGRAM", "--from": "./m.gguf", "--json-model-override-args": "{}"}


@pytest.fixture(autouse=True)
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the working folder nor in the hub's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(explain_vllm, "cached_file", lambda *_: None)


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    assert page == render(), "run: python -m quire.cli.peers_page > docs/coming-from.md"


@pytest.mark.parametrize(
    ("peer", "flag"),
    [(peer, flag) for peer in PEERS for flag in peer.flags],
    ids=lambda item: getattr(item, "name", ""),
)
def test_every_flag_becomes_a_setting_or_says_why_not(peer: Peer, flag: PeerFlag) -> None:
    assert flag.text
    assert not flag.text.endswith(".")
    assert (flag.kind == "translated") == bool(flag.to)
    assert (flag.kind == "refused") == bool(flag.instead)
    if flag.kind == "translated":
        value = VALUES.get(
            flag.flags[0], "q8_0" if "cache-type" in flag.flags[0] else True if flag.shape == "switch" else 7
        )
        (setting,) = flag.foreign().translation(value)
        assert setting in SETTINGS
    names = [name for other in peer.flags for name in other.flags]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("title", "text", "command"),
    [
        (
            "llama.cpp",
            "docker run -p 8080:8080 ghcr.io/ggml-org/llama.cpp:server -m /models/m.gguf -c 8192 -np 4 -ngl 99 "
            "-fa on -ctk q8_0 -ctv q8_0 --temp 0.7 --host 127.0.0.1 --no-mmap",
            "quire serve /models/m.gguf --max-model-len 8192 --max-num-seqs 4 --kv-cache-dtype int8 "
            "--override-generation-config '{\"temperature\": 0.7}' --host 127.0.0.1",
        ),
        (
            "llama.cpp",
            "llama-server -hf Qwen/Qwen3-0.6B-GGUF:Q8_0 -md draft.gguf --draft-max 4",
            "quire serve Qwen/Qwen3-0.6B-GGUF:Q8_0 "
            '--speculative-config \'{"model": "draft.gguf", "num_speculative_tokens": 4}\'',
        ),
        (
            "Ollama",
            "FROM hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0\n# more\nPARAMETER num_ctx 4096\nPARAMETER num_predict 200\n"
            'PARAMETER temperature 0.5\nLICENSE """\nmany\nlines\n"""\n',
            "quire serve Qwen/Qwen3-0.6B-GGUF:Q8_0 --max-model-len 4096 "
            '--override-generation-config \'{"max_new_tokens": 200, "temperature": 0.5}\'',
        ),
        (
            "SGLang",
            "python3 -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --mem-fraction-static 0.8 "
            "--disable-radix-cache --context-length 4096 --schedule-policy lpm --tp 1",
            "quire serve Qwen/Qwen3-0.6B --gpu-memory-utilization 0.8 --no-enable-prefix-caching --max-model-len 4096 "
            "--tensor-parallel-size 1",
        ),
        (
            "TGI",
            "text-generation-launcher --model-id Qwen/Qwen3-0.6B --max-total-tokens 2048 --max-input-tokens 1024 "
            "--json-output -p 8080",
            "quire serve Qwen/Qwen3-0.6B --max-model-len 2048 --log-format json --port 8080",
        ),
    ],
    ids=lambda value: value if len(value) < 12 else "",
)
def test_commands(title: str, text: str, command: str) -> None:
    explanation = explain_peer(text, BY_TITLE[title])
    assert explanation.starts, explanation.text()
    assert " ".join(explanation.command) == command


@pytest.mark.parametrize(
    ("title", "text", "name", "status", "part"),
    [
        ("llama.cpp", "llama-server --context-shift", "--context-shift", "refused", "contexts are not shifted"),
        ("llama.cpp", "llama-server --n-gpu-layer 3", "--n-gpu-layer", "never existed", "did you mean --n-gpu-layers?"),
        ("llama.cpp", "llama-server -ctk q8_0 -ctv f16", "-ctv", "contradictory", "say different things"),
        ("llama.cpp", "llama-server -ctk q4_1", "-ctk", "refused", "Use q8_0"),
        ("llama.cpp", "llama-server --host 0.0.0.0", "--host", "contradictory", "open to everybody"),
        ("llama.cpp", "llama-server -c 0", "-c", "no effect", "asks for what happens anyway"),
        ("Ollama", "FROM llama3.2", "--from", "refused", "Name the same model on the hub"),
        ("Ollama", "FROM ./m.gguf\nSYSTEM Be short.", "--system", "refused", "Send a message with the role system"),
        ("SGLang", "sglang serve --tp 2", "--tp", "translated", "--tensor-parallel-size 2"),
        ("TGI", "text-generation-launcher --max-batch-total-tokens 9", "--max-batch-total-tokens", "refused", "bytes"),
    ],
)
def test_answers(title: str, text: str, name: str, status: str, part: str) -> None:
    answer = next(answer for answer in explain_peer(text, BY_TITLE[title]).answers if answer.name == name)
    assert answer.status == status, answer.does
    assert part in answer.does


@pytest.mark.parametrize(
    ("title", "text"),
    [("Ollama", "llama-server -m x"), ("Ollama", "PARAMETER num_ctx 3"), ("llama.cpp", "vllm serve x"), ("TGI", "")],
)
def test_other_texts_are_refused(title: str, text: str) -> None:
    with pytest.raises(ConfigError):
        explain_peer(text, BY_TITLE[title])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Modelfile").write_text("FROM ./m.gguf\nPARAMETER num_ctx 4096\n")
    (tmp_path / "m.gguf").touch()
    assert main(["explain", "--json", "--llama-server", "llama-server -hf a/b --api-key secret"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["command"] == 'quire serve a/b --api-key "$VLLM_API_KEY"'
    assert main(["explain", "--modelfile", "missing"]) == 2
    assert main(["explain", "--modelfile", "Modelfile", "--tgi", "x"]) == 2
    assert "explains the flags of its own command" in capsys.readouterr().err
