"""Workloads: seeded, of the lengths asked for, from files as people have them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quire.demo
from quire.errors import ConfigError
from quire.frontend.tokenizer import Tokenizer
from quire.measure.options import Workload
from quire.measure.workload import BenchRequest, make_requests, named_workload

TOKENIZER = Tokenizer.from_folder(quire.demo.path("target"))


def make(**options: Any) -> list[BenchRequest]:
    return make_requests(Workload(**options), TOKENIZER)


def num_tokens(request: BenchRequest) -> int:
    return len(TOKENIZER.encode(request.prompt)) if isinstance(request.prompt, str) else len(request.prompt)


@pytest.mark.parametrize("name", ["random", "prefix_repetition"])
def test_same_seed_same_requests(name: str) -> None:
    options = {"dataset_name": name, "num_prompts": 12, "random_input_len": 40}
    first = make(seed=3, **options)
    assert first == make(seed=3, **options)
    others = {request.prompt for request in make(seed=4, **options)}
    assert not others & {request.prompt for request in first}, "another seed gives other prompts"
    assert len({str(request.prompt) for request in first}) == 12, "prompts are unique"


def test_random_lengths() -> None:
    requests = make(num_prompts=30, random_input_len=50, random_output_len=20, random_range_ratio="0.2")
    assert all(num_tokens(request) == request.prompt_len for request in requests)
    assert all(40 <= request.prompt_len <= 60 and 16 <= request.output_len <= 24 for request in requests)
    assert len({request.prompt_len for request in requests}) > 5
    fixed = make(num_prompts=5, input_len=33, output_len=7, random_range_ratio='{"input": 0, "output": 0.5}')
    assert {request.prompt_len for request in fixed} == {33}


def test_random_prompts_share_a_prefix() -> None:
    requests = make(num_prompts=4, random_input_len=10, random_prefix_len=30)
    ids = [TOKENIZER.encode(str(request.prompt)) for request in requests]
    shared = next(i for i in range(40) if len({tuple(own[: i + 1]) for own in ids}) > 1)
    assert shared >= 25, "joining may merge a token or two at the seam, not more"
    assert {request.prompt_len for request in requests} == {40}


def test_prefix_repetition() -> None:
    requests = make(
        dataset_name="prefix_repetition",
        num_prompts=9,
        prefix_repetition_prefix_len=60,
        prefix_repetition_suffix_len=10,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_output_len=5,
    )
    assert len({str(request.prompt)[:40] for request in requests}) == 3
    assert {request.prompt_len for request in requests} == {70}
    with pytest.raises(ConfigError, match="Fewer prompts than prefixes"):
        make(dataset_name="prefix_repetition", num_prompts=3)


def write(path: Path, rows: list[Any], *, lines: bool = True) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    return str(path)


def test_sharegpt(tmp_path: Path) -> None:
    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    question, answer = "What does os.path.join do, please?", "It joins the parts of a path."
    rows = [talk(question, answer), talk("one turn"), talk("x", answer), talk(question, "y"), {"other": 1}]
    path = write(tmp_path / "talks.json", rows, lines=False)
    options = {"dataset_name": "sharegpt", "dataset_path": path}
    (request,) = make(**options, num_prompts=3, oversample=False)
    assert request == BenchRequest(question, num_tokens(request), len(TOKENIZER.encode(answer)))
    assert make(**options, num_prompts=3) == [request] * 3, "a small file is repeated"
    fixed = make(**options, num_prompts=5, sharegpt_output_len=9, oversample=False)
    assert {each.output_len for each in fixed} == {9}
    assert len(fixed) == 2, "a short answer is no reason to drop a prompt whose answer has a fixed length"


def test_custom(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [{"prompt": "one", "output_tokens": 3}, {"prompt": "two", "output_tokens": 4}])
    options = Workload(
        dataset_name="custom", dataset_path=path, num_prompts=2, custom_output_len=-1, disable_shuffle=True
    )
    rendered = make_requests(options, TOKENIZER, lambda text: f"<{text}>")
    assert [(each.prompt, each.output_len) for each in rendered] == [("<one>", 3), ("<two>", 4)]
    assert [each.prompt for each in make_requests(options, TOKENIZER)] == ["one", "two"]
    bad = write(tmp_path / "bad.jsonl", [{"text": "one"}])
    with pytest.raises(ConfigError, match="no 'prompt'"):
        make(dataset_name="custom", dataset_path=bad)


def test_timed_trace(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 5000, "input_length": 40, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 5500, "input_length": 37, "output_length": 3, "hash_ids": [1, 2, 9]},
    ]
    path = write(tmp_path / "trace.jsonl", rows)
    first, second = make(dataset_name="timed_trace", dataset_path=path, timed_trace_sec_multiplier=0.001)
    assert (first.timestamp, second.timestamp) == (0.0, 0.5), "times begin with the first request"
    assert (num_tokens(first), num_tokens(second), second.output_len) == (40, 37, 3)
    assert first.prompt[:32] == second.prompt[:32], "equal ids are equal tokens"
    assert first.prompt[32:37] != second.prompt[32:37]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"dataset_name": "sharegpt"}, "needs a file"),
        ({"dataset_path": "x.json"}, "reads no file"),
        ({"dataset_name": "shargpt"}, "Did you mean 'sharegpt'"),
        ({"num_prompts": 0}, "positive number"),
        ({"random_range_ratio": "1.5"}, "range-ratio"),
        ({"timed_trace_sec_multiplier": float("nan")}, "more than 0"),
        ({"timed_trace_sec_multiplier": float("inf")}, "more than 0"),
        ({"timed_trace_sec_multiplier": 0.0}, "more than 0"),
        ({"dataset_name": "custom", "dataset_path": "no/such.jsonl"}, "cannot be read"),
    ],
)
def test_mistakes(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        make(**options)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[{"conversations": 5}]', "Entry 1 of"),
        ('[{"other": 1}, {"conversations": [{"from": "x"}, {"value": "y"}]}]', "Entry 2 of"),
        ('[{"conversations": [{"value": 5}, {"value": "y"}]}]', "Entry 1 of"),
        ('[{"conversations": ["x", "y"]}]', "Entry 1 of"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_conversations_of_another_form(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "talks.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        make(dataset_name="sharegpt", dataset_path=str(path))


def test_all_of_a_file_is_taken_once(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    every = replace(named_workload(path), oversample=True)
    assert len(make_requests(every, TOKENIZER)) == 2
