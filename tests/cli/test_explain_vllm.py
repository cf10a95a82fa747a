"""`quire explain --vllm`: every flag has an answer, texts are read as they are pasted, and nothing is executed.

The guides' own lines are in test_guides.py.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import Field
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.cli import explain_vllm
from quire.cli.explain_vllm import Answer, explain_command
from quire.cli.main import main
from quire.compat.commands import ABSENT_COMMANDS
from quire.compat.foreign import Foreign
from quire.compat.old_flags import INVENTED_FLAGS, OLD_FLAGS
from quire.compat.pasted import BROKEN, UNCONTINUED, read_pasted
from quire.compat.table import FOREIGN, as_flag
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.option import field_type, options
from tests.cli.reading import read

LINES = (Path(__file__).parent / "vllm_0_32_flags.txt").read_text().splitlines()[1:]
NUM_ENGINE_FLAGS = 252  # they come first in the file
LEGAL = {
    "data_parallel_backend": "mp",
    "nnodes": "1",
    "node_rank": "0",
    "block_size": "32",
    "tensor_parallel_size": "1",
    "decode_context_parallel_size": "1",
    "data_parallel_size": "1",
    "data_parallel_size_local": "1",
    "data_parallel_start_rank": "0",
    "distributed_executor_backend": "mp",
    "quantization": "awq",
    "slo": "itl=0.5",
    "speculative_config": """'{"method": "ngram"}'""",
    "spec_method": "ngram",
    "spec_model": "ngram",
    "lora_modules": "a=b",
    "root_path": "/a",
    "ssl_cert_reqs": "0",
}
# With any origin; with whole experts; with several nodes; never.
NOT_ALONE = ("allow_credentials", "enable_eplb", "headless", "trust_remote_code")


@pytest.fixture(autouse=True)
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the working folder nor in the hub's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(explain_vllm, "cached_file", lambda *_: None)


def _answers(text: str) -> dict[str, Answer]:
    return {answer.name: answer for answer in explain_command(text).answers}


def _words(entry: Foreign, flag: str) -> str:
    """The flag, asking for something."""
    if entry.shape == "switch":
        return "--no-" + flag.removeprefix("--") if any(value is True for value in entry.off) else flag
    return f"{flag} 17"


def test_every_engine_flag_of_vllm_is_classified() -> None:
    """All 252, and the server's, in every spelling: none is unknown, and each has an answer."""
    assert len(LINES[:NUM_ENGINE_FLAGS]) == NUM_ENGINE_FLAGS
    assert LINES[NUM_ENGINE_FLAGS - 1] == "--guide"
    for column in range(max(len(line.split()) for line in LINES)):
        flags = [line.split()[column] for line in LINES if len(line.split()) > column]
        answers = _answers("vllm serve m " + " ".join(flags))
        assert answers.keys() == {"MODEL", *flags}
        for name, answer in answers.items():
            assert answer.status != "never existed", name
            assert answer.does, name


@pytest.mark.parametrize("kind", ["accepted", "refused", "translated"])
def test_foreign_flags_are_answered_as_the_table_has_it(kind: str) -> None:
    entries = [entry for entry in FOREIGN.values() if entry.kind == kind]
    flags = {_words(entry, as_flag(entry.name)).split()[0]: entry for entry in entries}
    answers = _answers("vllm serve m " + " ".join(_words(entry, as_flag(entry.name)) for entry in entries))
    old, invented = ({entry.name for entry in entries} for entries in (OLD_FLAGS, INVENTED_FLAGS))
    for flag, entry in flags.items():
        answer = answers[flag]
        assert entry.text in answer.does or entry.kind == "translated", flag
        if kind == "accepted":
            assert answer.status == "no effect"
            assert answer.does.endswith("vLLM 0.32 no longer has it") == (entry.name in old)
        elif kind == "refused":
            expected = "removed" if entry.name in old else "never existed" if entry.name in invented else "refused"
            assert answer.status == expected, flag


def _setting(config: type, f: Field[Any]) -> str:
    """The flag with a legal value."""
    kind = field_type(get_type_hints(config)[f.name])[0]
    values = {bool: "", str: "x", int: "64", float: "0.5", dict: "'{}'"}
    value = LEGAL.get(f.name) or (f.metadata["choices"][-1] if f.metadata["choices"] else values[kind])
    return f"{as_flag(f.name)} {value}"


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_settings_are_the_same_with_their_own_texts(config: type) -> None:
    """What each does and limits is what its field says."""
    fields = {as_flag(f.name): f for f in options(config) if f.name not in NOT_ALONE}
    answers = _answers(" ".join(_setting(config, f) for f in fields.values()))
    assert answers.keys() == fields.keys()
    for flag, f in fields.items():
        answer = answers[flag]
        assert answer.status == "same", answer.does
        assert (answer.does, answer.limits) == (f.metadata["help"], f.metadata["limits"])


@pytest.mark.parametrize(
    ("words", "status", "part"),
    [
        ("--max-num-sequences 3", "never existed", "did you mean --max-num-seqs?"),
        ("–max-model-len 8192", "never existed", "did you mean --max-model-len?"),
        ("--xyzzy", "never existed", "Quire knows of no such flag in vLLM 0.1 to 0.32"),
        ("--max-num-scheduled-tokens 4k", "translated", "taken as --max-num-batched-tokens 4k: the budget of a step"),
        ("--load-format hf", "translated", "taken as auto"),
        ("--quantization bitsandbytes", "refused", "checkpoints of this quantizer are not read"),
        ("--kv-cache-dtype nvfp4", "refused", "Use fp8 or fp8_e5m2"),
        ("--dtype bfloat61", "refused", "Did you mean 'bfloat16'?"),
        ("--max-model-len long", "refused", "has an illegal value"),
        ("--max-model-len", "refused", "has no value"),
        ("--trust-remote-code", "refused", "never runs code from a model repository"),
        ("-dcp 1", "same", "Ranks that hold the same keys and values divide them"),
        ("-dcp 2", "contradictory", "2 does not divide the number of ranks, 1"),
        ("--dcp-comm-backend a2a", "no effect", "exchange queries and partial results through memory that they share"),
        ("--dcp-kv-cache-interleave-size 16", "no effect", "whole blocks of 256 tokens in turn"),
        ("-tp 2", "same", "Ranks that share one copy"),
        ("--host ::", "contradictory", "open to everybody"),
        ("--rope-scaling 3", "removed", "rope_scaling is not a JSON object"),
        ("--config serve.yaml", "same", "YAML file"),
        ("--help", "no effect", "starts nothing"),
        ("--port $PORT", "same", "Port to listen on"),
    ],
)
def test_answers(words: str, status: str, part: str) -> None:
    (answer,) = explain_command(f"vllm serve {words}").answers
    assert answer.status == status
    assert part in answer.does


def test_flags_that_contradict_each_other() -> None:
    answers = _answers("vllm serve --max-num-seqs 64 --max-num-batched-tokens 32 --max-num-active-seqs 8")
    assert answers["--max-num-seqs"].status == "same"
    assert answers["--max-num-batched-tokens"].status == "contradictory"
    assert "smaller than the number of running requests" in answers["--max-num-batched-tokens"].does
    assert "--max-num-active-seqs and --max-num-seqs say different things" in answers["--max-num-active-seqs"].does
    models = explain_command("vllm serve a --model b")
    assert [answer.status for answer in models.answers] == ["contradictory", "same"]
    first, second = explain_command("vllm serve m --port 1 --port 2").answers[1:]
    assert (first.status, first.does) == ("no effect", "it is given again: --port 2 counts")
    assert second.status == "same"


def test_what_it_costs_here() -> None:
    """Where the model can be read, as the bundled one can: numbers of `explain` itself."""
    answers = _answers("vllm serve --max-model-len 1024 --max-num-active-seqs 8")
    length, seqs = answers["--max-model-len"], answers["--max-num-active-seqs"]
    assert length.here == "1,024: the model allows 2048"
    assert length.next == "2048: one full request takes 6.0 MiB of KV cache, now 3.0 MiB"
    assert "2 contexts of 1,024 tokens for each of 8 running requests take 1,024 blocks" in length.limits
    assert (seqs.status, seqs.next.split(":")[0]) == ("translated", "16")
    assert not _answers("vllm serve not/here --max-model-len 1024")["--max-model-len"].next
    assert not _answers("--max-model-len 1024")["--max-model-len"].next, "a model that nobody named"


def test_memory_that_does_not_suffice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--vllm", "VLLM_CPU_KVCACHE_SPACE=0.0001 vllm serve --device cpu"]) == 1
    assert "A start would fail: The KV cache for one request of 2048 tokens does not fit" in capsys.readouterr().out


def test_variables() -> None:
    text = (
        "VLLM_LOGGING_LEVEL=DEBUG VLLM_USE_V1=1 VLLM_USE_MODELSCOPE=1 VLLM_CPU_KV_CACHE_SPACE=4 CUDA_VISIBLE_DEVICES=0"
    )
    explanation = explain_command(f"{text} QUIRE_NUM_THREADS=some HF_TOKEN=hidden vllm serve")
    found = {answer.name: answer.status for answer in explanation.answers}
    assert found == {
        "VLLM_LOGGING_LEVEL": "same",
        "VLLM_USE_V1": "no effect",
        "VLLM_USE_MODELSCOPE": "refused",
        "VLLM_CPU_KV_CACHE_SPACE": "no effect",
        "CUDA_VISIBLE_DEVICES": "same",
        "QUIRE_NUM_THREADS": "refused",
        "HF_TOKEN": "same",
    }
    assert "did you mean VLLM_CPU_KVCACHE_SPACE?" in explanation.text()
    expected = ["VLLM_LOGGING_LEVEL=DEBUG", "CUDA_VISIBLE_DEVICES=0", 'HF_TOKEN="$HF_TOKEN"', "quire", "serve"]
    assert explanation.command == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("$ vllm serve m --port 1", ["m", "--port", "1"]),
        ("sudo nohup python3 -m vllm.entrypoints.openai.api_server --port 1 > log 2>&1 &", ["--port", "1"]),
        ("uv run vllm serve m \\\r\n  --port 1\r\n", ["m", "--port", "1"]),
        ('/opt/venv/bin/vllm serve \'a b\' --x "c \\"d\\"" e\\ f', ["a b", "--x", 'c "d"', "e f"]),
        ("docker run --gpus all -e A=b --name vllm -p 1:2 vllm/vllm-openai:v0.9 --model m", ["--model", "m"]),
        ("docker run --entrypoint vllm vllm/vllm-openai serve m", ["serve", "m"]),
        ("podman run quay.io/x/vllm-cpu:latest vllm serve m", ["m"]),
        ("cd /srv && export A=b; vllm serve m | tee log", ["m"]),
        ("vllm serve m \\\n  # a comment\n  --port 1 \\ # another\n\n  --x", ["m", "--port", "1", "--x"]),
        ("vllm serve m --port 1 # don't\n", ["m", "--port", "1"]),
        ("vllm serve m --port 1\n--x 2", ["m", "--port", "1", "--x", "2"]),
        ("vllm serve \\ --port 1 \\ --x 2", ["--port", "1", "--x", "2"]),
        ("vllm serve <model> --x $(nproc --all) ${Y}", ["<model>", "--x", "$(nproc --all)", "${Y}"]),
        ("vllm serve m --x '{\"a\":\n 1}'", ["m", "--x", '{"a":\n 1}']),
        ("vllm serve m\xa0--port 1", ["m", "--port", "1"]),
    ],
)
def test_pasted_texts(text: str, words: list[str]) -> None:
    assert read_pasted(text).words == words


PIECES = (
    "vllm serve", "docker run vllm/vllm-openai", "python -m vllm.entrypoints.openai.api_server", "A=b", "m", "<m>",
    "--port", "--port=1", "--dtype", "--swap-space 4", "--no-x", "-tp", "-O3", "--hf-overrides.a", "'a b'", "'",
    '"a\\"b"', '"', "\\", "\\\n", "\n", " ", " ", "#", "$X", "$(", "`", "&", "&&", "2>&1", ">", "<", ";", "|", "(",
    "\x1b[1m", "\udc80",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text(text: str) -> None:
    """A printable answer, with a command that our parser reads; or an error that names the fault."""
    refusal, explanation = "", None
    try:
        explanation = explain_command(text)
    except ConfigError as error:
        refusal = error.message
    if explanation is None:
        assert refusal.replace("\n", "").isprintable()
        return
    assert explanation.text().replace("\n", "").isprintable()
    command = " ".join(explanation.command)
    if "$" not in command and "`" not in command:  # what only a shell can fill in
        words = shlex.split(command)
        read(*words[words.index("serve") + 1 :])


def test_notes_on_what_a_shell_would_do() -> None:
    assert read_pasted("vllm serve m \\\n --port 1").notes == []
    assert read_pasted("vllm serve m \\ # c\n --port 1").notes == [BROKEN]
    assert read_pasted("vllm serve m \\ \n --port 1").notes == [BROKEN]
    assert read_pasted("vllm serve m\n --port 1").notes == [UNCONTINUED]
    assert read_pasted("pip install vllm\nvllm serve m").notes == ["not read: the command pip"]
    assert read_pasted("docker run -e A=b --env C=d vllm/vllm-openai m").variables == {"A": "b", "C": "d"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "There is no command in the text"),
        ("# only a comment\n\n", "There is no command in the text"),
        ("ls -l /tmp", "There is no command of vLLM's in the text"),
        ("vllm", "There is no command of vLLM's in the text"),
        ("vllm serve 'm", "A quotation mark ' is not closed"),
        ('vllm serve "m', 'A quotation mark " is not closed'),
        ("vllm serve m\0", "zero byte"),
        ("vllm serve a\nvllm serve b", "The text starts 2 servers"),
        ("vllm bench serve --model m", "vllm bench does not start a server"),
        ("vllm serve m --hf-overrides.a", "--hf-overrides.a has no value"),
        *((f"vllm {name} x", f"`quire {name}` does not exist") for name in ABSENT_COMMANDS),
    ],
)
def test_texts_that_are_refused(text: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--vllm", text]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("words", [["m"], ["--model", "m"], ["--port", "1"], ["--swap-space", "4"]])
def test_nothing_beside_the_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--vllm", "vllm serve m", *words]) == 2
    assert "--vllm explains the flags of its own command, but other flags are given too" in capsys.readouterr().err


def _explain_argument(text: str, _: pytest.MonkeyPatch) -> list[str]:
    return ["explain", "--vllm", text]


def _explain_option(text: str, _: pytest.MonkeyPatch) -> list[str]:
    return ["explain", f"--vllm={text}"]


def _explain_standard_input(text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return ["explain", "--vllm", "-"]


@pytest.mark.parametrize("way", [_explain_argument, _explain_option, _explain_standard_input])
def test_ways_to_give_the_text(
    way: Callable[[str, pytest.MonkeyPatch], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also flags alone, whose first characters look like a flag of `explain`."""
    assert main(way("--gpu-memory-utilization 0.95 \\\n--max_model_len 4096", monkeypatch)) == 0
    output = capsys.readouterr().out
    assert output.endswith("\nquire serve \\\n    --gpu-memory-utilization 0.95 \\\n    --max-model-len 4096\n")


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever a text goes: names, values, variables, notes, the command, and errors."""
    text = "echo \x1b]0;n\x07\nA=\x1b[1m vllm serve 'm\x1b[2J\nfake' --served-model-name \x1b[31mx --\x1b[5mfoo"
    text += " --dtype \u202ex"
    for words in ([], ["--json"]):
        assert main(["explain", "--vllm", text, *words]) == 1
        output = capsys.readouterr().out
        assert output.replace("\n", "").isprintable()
        assert "\nfake" not in output
    json.loads(output)
    for bad in ("\x1b[31m", "vllm serve '\x1b[31m", "\x1b[1mvllm bench \x1b[31m"):
        assert main(["explain", "--vllm", bad]) == 2
        assert "\x1b" not in capsys.readouterr().err


def test_nothing_is_executed_or_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("explain --vllm does nothing but read")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("subprocess.Popen", refuse)
    text = 'touch a; vllm serve org/name --port $(touch b) --dtype `touch c` --seed "$(touch d)" > e && touch f'
    assert explain_command(text).starts
    assert not list(tmp_path.iterdir())


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = "OPENAI_API_KEY=hidden vllm serve --api-key hidden hidden2 --hf-token hidden --host 0.0.0.0"
    for words in ([], ["--json"]):
        assert main(["explain", "--vllm", text, *words]) == 0
        output = capsys.readouterr().out
        assert "hidden" not in output
    assert "hidden" not in explain_command("curl -H hidden; AWS_SECRET=hidden vllm serve --apikey hidden").text()
    assert '--api-key "$VLLM_API_KEY" --hf-token "$HF_TOKEN"' in json.loads(output)["command"]


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --api-key sk-hidden$X --hf-token $(hidden)",
        "HTTPS_PROXY=http://u:hidden@p:1 HF_HOME=http://u:hidden@p vllm serve m --served-model-name http://u:hidden@p",
        "DB_PASSWD=hidden MY_PASS=hidden AUTH=hidden CREDENTIALS=hidden DSN=hidden VLLM_XY=hidden vllm serve m",
        "DSN=hidden curl x; vllm serve m",
    ],
)
def test_secrets_of_a_shell_and_of_others_are_not_shown(text: str) -> None:
    assert "hidden" not in explain_command(text).text()


@pytest.mark.parametrize("text", ["curl -H hidden", "DSN=hidden curl x", "vllm serve --api-key 'hidden"])
def test_errors_show_no_secrets(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        explain_command(text)
    assert "hidden" not in error.value.message


def test_json_says_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = "vllm serve --max-num-seqs 8 --swap-space 4 --hf-overrides.a.b 1"
    assert main(["explain", "--vllm", text]) == 0
    shown = capsys.readouterr().out
    assert main(["explain", "--vllm", text, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["starts"], answer["error"], answer["is_model_known"]) == (True, None, True)
    for flag in answer["flags"]:
        assert f"{flag['name']} {flag['value']}   [{flag['status']}]" in shown
        for label in ("does", "limits", "here", "next"):
            assert flag[label] in shown
    words = shlex.split(answer["command"])
    assert words == ["quire", "serve", "--max-num-seqs", "8", "--hf-overrides", '{"a": {"b": 1}}']
    assert read(*words[2:])[0].max_num_seqs == 8


def test_the_example_of_the_documents(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    command, _, output = page.partition("$ quire explain --vllm '")[2].partition("'\n")
    assert main(["explain", "--vllm", command]) == 1
    assert output.startswith(capsys.readouterr().out + "```")


def test_a_model_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(explain_vllm, "cached_file", lambda *_: tmp_path / "config.json")
    explanation = explain_command("vllm serve org/name --port 1")
    assert explanation.error is not None
    assert "config.json" in explanation.error, "it is read, and holds nothing"


def test_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("no model")
    answer, port = explain_command("vllm serve m --port 1").answers
    assert (answer.status, port.status) == ("contradictory", "same")
    assert "not a GGUF file" in answer.does


def test_the_text_leaves_the_list_of_processes() -> None:
    """It may hold a key."""
    code = (
        "import sys\nfrom quire.cli.main import main\nmain(sys.argv[1:])\n"
        "print(open('/proc/self/cmdline').read(), [n for n in ('torch', 'transformers') if n in sys.modules])"
    )
    words = ["explain", "--vllm", "vllm serve --api-key hidden"]
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert "hidden" not in result.stdout
    assert result.stdout.rstrip().endswith("[]"), "and torch is not loaded"


def test_an_error_names_its_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        explain_command("ls")
    assert caught.value.param == "vllm"
