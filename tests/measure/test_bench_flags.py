"""Every flag of vLLM's benchmarks is a flag here or is answered with the reason why not."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from quire.cli.flags import Parser
from quire.compat.bench_flags import ABSENT_BENCH_FLAGS
from quire.measure.options import Target
from quire.measure.serving import Server
from quire.measure.workload import BenchRequest

LINES = (Path(__file__).parent / "vllm_0_32_bench_flags.txt").read_text().splitlines()[1:]
OWN = ("serve --backend", "serve --lora-assignment")  # the other commands do not have these
REFUSED = [line for line in LINES if line.split()[1] in ABSENT_BENCH_FLAGS and line not in OWN]


@cache
def parser(command: str) -> Parser:
    from quire.cli.main import build_parser

    return build_parser()._chosen(["bench", command])


def test_the_list_is_whole() -> None:
    assert len(LINES) > 140
    assert len(set(LINES)) == len(LINES)
    assert {line.split()[0] for line in LINES} == {"serve", "throughput", "latency", "startup"}


def test_flag_of_vllm_is_known() -> None:
    unknown = [line for line in LINES if line.split()[1] not in parser(line.split()[0])._option_string_actions]
    assert not unknown


def test_what_is_refused_is_vllms() -> None:
    assert {line.split()[1] for line in LINES} >= ABSENT_BENCH_FLAGS.keys()


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_says_why_on_every_command_of_vllms(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, flag = line.split()
    with pytest.raises(SystemExit) as end:
        parser(command).parse_args([flag, "x"])
    assert end.value.code == 2
    assert f"{flag} is not supported: {ABSENT_BENCH_FLAGS[flag]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("throughput", "--backend", "vllm"), "only Quire's own engine is measured"),
        (("serve", "--request-id-prefix", "x"), "the server names requests"),
        (("serve", "--trust-remote-code"), "is never run"),
    ],
)
def test_the_reason(words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser(words[0]).parse_args(list(words[1:]))
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("assignment", ["random", "round-robin"])
def test_requests_get_the_adapters_that_are_named(assignment: str) -> None:
    target = Target(lora_modules=("a", "b"), lora_assignment=assignment)
    runs = []
    for _ in range(2):
        body = Server(target, "base", "base").make_body(ignore_eos=True)
        runs.append([body(BenchRequest("Hi", 1, 1))["model"] for _ in range(20)])
    assert runs[0] == runs[1], "each run has the same ones"
    assert set(runs[0]) == {"a", "b"}
    assert (runs[0] == ["a", "b"] * 10) == (assignment == "round-robin")
    assert Server(Target(), "base", "base").make_body(ignore_eos=True)(BenchRequest("Hi", 1, 1))["model"] == "base"
