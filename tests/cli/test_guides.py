"""The command lines of the five guides: each runs, runs with a notice, or is refused, and `explain --vllm` says so.

Lines that are rebuilt from the rows are named in `guides.REBUILT`, the others are verbatim.
"""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path

import pytest

from quire.cli import explain_vllm
from quire.cli.explain_vllm import STOPS, explain_command
from quire.cli.main import main
from quire.compat.environment import check_environment
from quire.compat.pasted import BROKEN, ESCAPED, read_pasted
from quire.config import EngineConfig, ServerConfig
from quire.entry.listen import check_guarded
from quire.errors import ConfigError
from quire.planning import devices
from quire.speculative_config import SpeculativeConfig
from tests.cli.guides import LINES, OTHERS, REBUILT, S0_3, Line
from tests.cli.reading import read

RUNS = [line for line in LINES if not line.statuses]
REFUSED = [line for line in LINES if STOPS & set(line.statuses.values())]
RUNS_WITH_NOTICE = [line for line in LINES if line not in RUNS and line not in REFUSED]


def _row(line: Line) -> str:
    return line.row


@pytest.fixture(autouse=True)
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the working folder nor in the hub's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(explain_vllm, "cached_file", lambda *_: None)


def _check(words: list[str], settings: dict[str, object]) -> tuple[EngineConfig, ServerConfig]:
    engine, server = read(*words)
    for name, value in settings.items():
        assert getattr(engine if hasattr(engine, name) else server, name) == value
    check_guarded(server, server.api_key)
    return engine, server


@pytest.mark.parametrize("line", RUNS, ids=_row)
def test_runs(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _check(read_pasted(line.text).words, line.settings)
    assert not caplog.records, "flags that do what the guide says need no notice"


@pytest.mark.parametrize("line", RUNS_WITH_NOTICE, ids=_row)
def test_runs_with_notice(line: Line, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pasted = read_pasted(line.text)
    for name, value in pasted.variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        _check(pasted.words, line.settings)
        check_environment()
    noticed = {record.getMessage().partition(" ")[0] for record in caplog.records}
    assert noticed == line.statuses.keys() - {"--num-speculative-decoder-samples"}, "0 of them asks for nothing"


@pytest.mark.parametrize("line", REFUSED, ids=_row)
def test_refused(line: Line) -> None:
    with pytest.raises(ConfigError) as caught:
        _check(read_pasted(line.text).words, {})
    param = caught.value.param or ""
    assert param == "speculative_config" or "--" + param.replace("_", "-") in line.statuses
    assert caught.value.fix, "a refusal says what to do"


@pytest.mark.parametrize("line", LINES, ids=_row)
def test_explained(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    """Each flag, its effect at a start, and a command for Quire that our own parser reads without a notice."""
    with caplog.at_level(logging.WARNING):
        explanation = explain_command(line.text)
        found = {answer.name: answer.status for answer in explanation.answers if answer.status != "same"}
        assert found == line.statuses
        assert explanation.starts == (line not in REFUSED)
        flags = [word.partition("=")[0] for word in read_pasted(line.text).words if word.startswith("--")]
        assert [answer.name for answer in explanation.answers if answer.name.startswith("--")] == flags
        says = [answer.does for answer in explanation.answers if answer.status != "same"]
        assert line.says in (says or [""])[0]
        assert " ".join(explanation.command) == f"quire serve {line.command}".rstrip()
        words = shlex.split(" ".join(explanation.command))
        _check(words[2:], line.settings)
    assert not caplog.records


def test_most_lines_are_verbatim() -> None:
    rows = {line.row for line in LINES}
    assert rows > REBUILT
    assert len([line for line in LINES if line.row not in REBUILT]) > len(LINES) // 2


def test_what_a_shell_would_do() -> None:
    """It ends a command at `\\` with a blank and a comment (S0-3, S2-3). S3's commands are one line with `\\ `."""
    for line in LINES:
        notes = explain_command(line.text).notes
        assert (BROKEN in notes) == (line.row in ("S0-3", "S2-3"))
        assert (ESCAPED in notes) == (line.row in ("S3-1", "S3-2", "S3-4", "S3-6"))


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["text", "json"])
def test_awq_on_a_checkpoint_that_is_none(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S0-3, an error of the guide: Mistral-7B-Instruct-v0.3 is in bfloat16. Known where its config.json is."""
    folder = tmp_path / "mistralai" / "Mistral-7B-Instruct-v0.3"
    folder.mkdir(parents=True)
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 32768}
    names = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "torch_dtype": "bfloat16"}
    common = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "hidden_act": "silu", "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(sizes | names | common))
    monkeypatch.setattr(devices, "total_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(devices, "free_memory_bytes", lambda: 60 << 30)
    assert main(["explain", "--vllm", S0_3, *words]) == 1
    output = capsys.readouterr().out
    if not words:
        assert "--quantization awq   [contradictory]\n    does    The checkpoint is not quantized in this way" in output
        assert "Quire does not start with --quantization." in output
        assert output.rstrip().endswith("--tensor-parallel-size 1 \\\n    --dtype float16"), "and awq is left out"
        return
    shown = json.loads(output)
    flags = {flag["name"]: flag for flag in shown["flags"]}
    assert [name for name, flag in flags.items() if flag["status"] != "same"] == ["--quantization"]
    assert "floating point: leave --quantization out" in flags["--quantization"]["does"]
    assert flags["--max-model-len"]["here"] == "8,192: the model allows 32768"
    assert flags["--max-model-len"]["next"].startswith("16384: one full request takes 2.00 GiB of KV cache")
    assert not shown["starts"]


def test_a_key_lets_others_connect() -> None:
    (line,) = [line for line in LINES if line.row == "S0-18"]
    explanation = explain_command("VLLM_API_KEY=secret " + line.text)
    assert explanation.starts
    assert "--host 0.0.0.0" in " ".join(explanation.command)
    assert "secret" not in explanation.text() + json.dumps(explanation.as_dict())


@pytest.mark.parametrize(("row", "text", "part"), OTHERS, ids=[row for row, *_ in OTHERS])
def test_what_starts_no_server(row: str, text: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--vllm", text]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert ("vllm.benchmarks.benchmark_serving does not start a server" in error) == (row == "S1-4")


def test_models_in_python() -> None:
    """S4's other uses of `LLM`."""
    config = EngineConfig.from_kwargs(model="meta-llama/Llama-3.3-70B-Instruct", tensor_parallel_size=4)
    assert config.tensor_parallel_size == 4
    assert EngineConfig.from_kwargs(model="model-name", max_num_batched_tokens=2048).max_num_batched_tokens == 2048


def test_speculation_in_python() -> None:
    """S4-4."""
    config = EngineConfig.from_kwargs(model="m", speculative_model="d", num_speculative_tokens=5)
    assert config.speculative_config == SpeculativeConfig(method="draft_model", model="d", num_speculative_tokens=5)
    config = EngineConfig.from_kwargs(model="m", speculative_model="[ngram]", num_speculative_tokens=5)
    assert config.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=5)


def test_output_processing_in_python(caplog: pytest.LogCaptureFixture) -> None:
    """S2-15: the value of the guide is vLLM's default."""
    with caplog.at_level(logging.WARNING):
        config = EngineConfig.from_kwargs(max_num_seqs=32, max_num_batched_tokens=4096, disable_async_output_proc=False)
    assert config.max_num_seqs == 32
    assert not caplog.records


def test_deep_gemm_variable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """S4-31 pairs it with the KV cache's dtype, which is a separate setting."""
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    with caplog.at_level(logging.WARNING):
        check_environment()
    assert "VLLM_USE_DEEP_GEMM has no effect: it is about block-FP8 weights on GPUs" in caplog.text
