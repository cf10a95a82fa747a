"""Workloads from a seed: equal options, seed and tokenizer give equal requests. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from quire.compat.names import nearest
from quire.errors import ConfigError
from quire.frontend.chat_template import ChatRenderer
from quire.frontend.tokenizer import Tokenizer
from quire.measure.options import Workload

ALL = sys.maxsize  # all requests of a file, each once
MAX_TIME, MAX_TOKENS = 1e15, 10_000_000  # limits of values in a data set; larger values are mistakes or not finite
MAX_FITS = 30  # tries to make a text with a given number of tokens
# vLLM keeps recorded conversations in these limits: least tokens of each part, most of the prompt, most of both.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048


@dataclass(frozen=True)
class BenchRequest:
    """One request to send.

    Args:
        prompt: a text, or token ids.
        prompt_len: the number of tokens of the prompt, with the special ones.
        output_len: the number of tokens of the answer.
        timestamp: the seconds after the first request of a trace; None: the workload is no trace.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    timestamp: float | None = None


# Workloads by name: mean tokens of prompts and of answers. Chat and code are from the traces of Azure's services (Patel
# et al., Splitwise, ISCA 2024). rag, documents that are found for a question, is an assumption.
NAMED_WORKLOADS = {"chat": (1155, 211), "code": (2048, 28), "rag": (4096, 256)}
NAMED_RANGE = "0.5"  # lengths of named workloads are 0.5 to 1.5 times the mean


class BenchTokenizer(Protocol):
    """The part of quire.frontend.tokenizer.Tokenizer that a workload needs."""

    vocab_size: int
    added_token_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


Render = Callable[[str], str]  # a user's message -> the prompt of the chat template


def chat_render(tokenizer: Tokenizer) -> Render | None:
    """A function that puts the model's chat template around one message; None without a template."""
    if "default" not in tokenizer.chat_templates:
        return None
    renderer = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens, name=tokenizer.name)
    return lambda text: renderer.render([{"role": "user", "content": text}])


def named_workload(text: str) -> Workload:
    """The workload `chat`, `rag`, `code`, `random:IN/OUT`, or a file: a timed trace, JSON lines, or ShareGPT's JSON.

    Raises ConfigError for another text.
    """
    if text in NAMED_WORKLOADS:
        prompt, output = NAMED_WORKLOADS[text]
        return Workload(random_input_len=prompt, random_output_len=output, random_range_ratio=NAMED_RANGE)
    if match := re.fullmatch(r"random:(\d{1,8})/(\d{1,8})", text):
        prompt, output = map(int, match.groups())
        if prompt and output:
            return Workload(random_input_len=prompt, random_output_len=output)
    if not text.startswith("random:") and os.path.isfile(text):  # a Path raises for a long text
        kind, more = _kind_of(Path(text))
        return Workload(dataset_name=kind, dataset_path=text, num_prompts=ALL, oversample=False, **more)
    near = nearest(text, NAMED_WORKLOADS)
    raise ConfigError(
        "Unknown workload",
        value=text,
        expected=f"{', '.join(NAMED_WORKLOADS)}, random:IN/OUT such as random:512/128, or a file of requests",
        fix=f"Did you mean {near!r}?" if near else None,
        param="workload",
    )


def _kind_of(path: Path) -> tuple[str, dict[str, Any]]:
    """The kind of the data set by its first line, and options for it."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    if first.lstrip().startswith("["):
        return "sharegpt", {}
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict) and "input_length" in row:
        return "timed_trace", {}
    if isinstance(row, dict) and "prompt" in row:
        return "custom", {"custom_output_len": -1} if "output_tokens" in row else {}
    raise ConfigError(
        f"The first line of {path} is of no known workload",
        expected="a list of conversations, or an object with input_length and output_length, or with prompt",
        param="workload",
    )


def request_lengths(options: Workload, open_tokenizer: Callable[[], BenchTokenizer]) -> list[tuple[int, int]]:
    """For each request of a workload, the number of tokens of its prompt and of its answer.

    Texts are made only if their tokens must be counted.

    Raises ConfigError like `make_requests`.
    """
    if options.dataset_name == "random":
        rng, prefix_len = random.Random(options.seed), options.random_prefix_len
        input_ratio, output_ratio = _ratios(options.random_range_ratio)
        lengths = ((options.random_input_len, input_ratio), (options.random_output_len, output_ratio))
        drawn = ([_around(mean, ratio, rng) for mean, ratio in lengths] for _ in range(options.num_prompts))
        return [(max(prefix_len + num_in, 1), max(num_out, 1)) for num_in, num_out in drawn]
    if options.dataset_name == "prefix_repetition":
        prompt_len = options.prefix_repetition_prefix_len + options.prefix_repetition_suffix_len
        return [(prompt_len, options.prefix_repetition_output_len)]
    if options.dataset_name == "timed_trace":
        return [(num_in, num_out) for num_in, num_out, _ in _trace_rows(options)]
    return [(each.prompt_len, each.output_len) for each in make_requests(options, open_tokenizer())]


def make_requests(options: Workload, tokenizer: BenchTokenizer, render: Render | None = None) -> list[BenchRequest]:
    """The requests of a workload in the order of sending.

    Args:
        render: applies the chat template to custom prompts; None: the plain prompts are sent.

    Raises:
        ConfigError: the file cannot be read or gives no request, or a length cannot be reached.
    """
    rng = random.Random(options.seed)
    if options.dataset_name == "random":
        return _random(options, tokenizer, rng)
    if options.dataset_name == "prefix_repetition":
        return _prefix_repetition(options, tokenizer, rng)
    if options.dataset_name == "timed_trace":
        return _timed_trace(options, tokenizer)
    if options.dataset_name == "sharegpt":
        found = _sharegpt(options, tokenizer, rng)
    else:
        found = _custom(options, tokenizer, rng, None if options.skip_chat_template else render)
    if not found:
        raise ConfigError("The file has no usable entry", value=options.dataset_path, param="dataset_path")
    missing = options.num_prompts - len(found) if options.num_prompts != ALL and options.oversample else 0
    return found + rng.choices(found, k=max(missing, 0))


def _random(options: Workload, tokenizer: BenchTokenizer, rng: random.Random) -> list[BenchRequest]:
    input_ratio, output_ratio = _ratios(options.random_range_ratio)
    input_len = options.input_len or options.random_input_len
    output_len = options.output_len or options.random_output_len
    texts = _Texts(tokenizer, rng)
    prefix = texts.draw(options.random_prefix_len)
    requests = []
    for _ in range(options.num_prompts):
        length = _around(max(input_len - texts.num_special, 0), input_ratio, rng)
        if len(prefix) + length < 1:
            raise ConfigError("A random prompt would be empty", value=input_len, param="random_input_len")
        prompt, prompt_len = texts.text(prefix + texts.draw(length))
        requests.append(BenchRequest(prompt, prompt_len, max(_around(output_len, output_ratio, rng), 1)))
    return requests


def _prefix_repetition(options: Workload, tokenizer: BenchTokenizer, rng: random.Random) -> list[BenchRequest]:
    num_prefixes = options.prefix_repetition_num_prefixes
    if options.num_prompts < num_prefixes:
        raise ConfigError("Fewer prompts than prefixes", value=options.num_prompts, expected=f">= {num_prefixes}")
    texts = _Texts(tokenizer, rng)
    output_len = options.output_len or options.prefix_repetition_output_len
    prefixes = [texts.draw(options.prefix_repetition_prefix_len) for _ in range(num_prefixes)]
    requests = []
    for i in range(options.num_prompts):
        ids = prefixes[i % num_prefixes] + texts.draw(options.prefix_repetition_suffix_len)
        requests.append(BenchRequest(*texts.text(ids), output_len))
    rng.shuffle(requests)
    return requests


def _sharegpt(options: Workload, tokenizer: BenchTokenizer, rng: random.Random) -> list[BenchRequest]:
    talks = [_turns(entry, i, options) for i, entry in enumerate(_read_json(options), 1)]
    conversations = [turns for turns in talks if len(turns) >= 2]
    if not options.disable_shuffle:
        rng.shuffle(conversations)
    fixed = options.output_len or options.sharegpt_output_len
    requests: list[BenchRequest] = []
    for first, second, *_ in conversations:
        if len(requests) == options.num_prompts:
            break
        prompt_len = len(tokenizer.encode(first))
        output_len = fixed or len(tokenizer.encode(second))
        is_long_enough = prompt_len >= MIN_TOKENS and (fixed is not None or output_len >= MIN_TOKENS)
        if is_long_enough and prompt_len <= MAX_PROMPT_TOKENS and prompt_len + output_len <= MAX_TOTAL_TOKENS:
            requests.append(BenchRequest(first, prompt_len, output_len))
    return requests


def _turns(entry: Any, number: int, options: Workload) -> list[str]:
    """The texts of a conversation; [] for an entry without one. Raises ConfigError for another form."""
    turns = entry.get("conversations", []) if isinstance(entry, dict) else []
    texts = (
        [turn.get("value") if isinstance(turn, dict) else None for turn in turns] if isinstance(turns, list) else [None]
    )
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"Entry {number} of {options.dataset_path} is no conversation",
            value=turns,
            expected='"conversations": a list of objects with a text "value"',
            param="dataset_path",
        )
    return [str(text) for text in texts]


def _custom(
    options: Workload, tokenizer: BenchTokenizer, rng: random.Random, render: Render | None
) -> list[BenchRequest]:
    rows = _read_lines(options)
    if not options.disable_shuffle:
        rng.shuffle(rows)
    requests = []
    for row in rows[: options.num_prompts]:
        prompt = row.text("prompt")
        output_len = options.output_len or options.custom_output_len
        if output_len == -1:
            output_len = row.count("output_tokens")
        text = prompt if render is None else render(prompt)
        requests.append(BenchRequest(text, len(tokenizer.encode(text)), output_len))
    return requests


def _timed_trace(options: Workload, tokenizer: BenchTokenizer) -> list[BenchRequest]:
    allowed = _allowed(tokenizer)
    chunk = options.timed_trace_chunk_hash_size
    requests: list[BenchRequest] = []
    for length, output_len, row in _trace_rows(options):
        ids: list[int] = []
        for hash_id in row.items(options.timed_trace_label_hash_ids):
            ids += _chunk_tokens(f"{options.seed}:{hash_id}", chunk, allowed)
        # After its hashes a prompt shares no token with other prompts.
        ids += _chunk_tokens(f"{options.seed}/{len(requests)}", max(length - len(ids), 0), allowed)
        timestamp = row.number(options.timed_trace_label_timestamp) * options.timed_trace_sec_multiplier
        requests.append(BenchRequest(ids[:length], length, output_len, timestamp))
    start = min(request.timestamp or 0.0 for request in requests)
    shifted = [replace(request, timestamp=(request.timestamp or 0.0) - start) for request in requests]
    return sorted(shifted, key=lambda request: request.timestamp or 0.0)


def _trace_rows(options: Workload) -> list[tuple[int, int, _Row]]:
    """For each request of a trace: tokens of the prompt, tokens of the answer, and the whole row."""
    rows = [
        (
            row.count(options.timed_trace_label_input_length),
            options.output_len or row.count(options.timed_trace_label_output_length),
            row,
        )
        for row in _read_lines(options)[: options.num_prompts]
    ]
    if not rows:
        raise ConfigError("The trace is empty", value=options.dataset_path, param="dataset_path")
    return rows


class _Texts:
    """Draws random token ids, and makes texts with a given number of tokens."""

    def __init__(self, tokenizer: BenchTokenizer, rng: random.Random) -> None:
        self._tokenizer, self._rng = tokenizer, rng
        self._allowed = _allowed(tokenizer)
        self._is_text: dict[int, bool] = {}
        self.num_special = len(tokenizer.encode(""))  # tokens that are added to every prompt

    def draw(self, count: int) -> list[int]:
        """Draw tokens of whole characters, because a part of a character is no text."""
        drawn: list[int] = []
        while len(drawn) < count:
            drawn += filter(self._check, self._rng.choices(self._allowed, k=count - len(drawn)))
        return drawn

    def _check(self, token_id: int) -> bool:
        if token_id not in self._is_text:
            self._is_text[token_id] = "\ufffd" not in self._tokenizer.decode([token_id])
        return self._is_text[token_id]

    def text(self, token_ids: list[int]) -> tuple[str, int]:
        """A text with the same number of tokens and nearly these tokens, and its length with the special ones.

        Tokens may merge when they are joined to a text, so the text is cut or made longer until its length is right.
        """
        wanted = len(token_ids)
        for _ in range(MAX_FITS):
            text = self._tokenizer.decode(token_ids)
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) == wanted:
                break
            token_ids = token_ids[:wanted] + self.draw(wanted - len(token_ids))
        return text, len(self._tokenizer.encode(text))


def _allowed(tokenizer: BenchTokenizer) -> list[int]:
    """Token ids that are plain text."""
    return [i for i in range(tokenizer.vocab_size) if i not in tokenizer.added_token_ids]


def _chunk_tokens(key: str, count: int, allowed: list[int]) -> list[int]:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    return random.Random(seed).choices(allowed, k=count)


def _ratios(text: str) -> tuple[float, float]:
    try:
        value = json.loads(text)
        ratios = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
        found = float(ratios[0]), float(ratios[1])
    except (ValueError, KeyError, TypeError):
        found = -1.0, -1.0
    if not all(0 <= ratio < 1 for ratio in found):
        raise ConfigError(
            "Illegal --random-range-ratio", value=text, expected='0 to below 1, or {"input": 0.3, "output": 0.5}'
        )
    return found


def _around(mean: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio)))


def _read(options: Workload) -> str:
    assert options.dataset_path is not None
    try:
        return Path(options.dataset_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The data set cannot be read: {error}", param="dataset_path") from None


def _read_json(options: Workload) -> list[Any]:
    try:
        data = json.loads(_read(options))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{options.dataset_path} is not JSON: {error}", param="dataset_path") from None
    if not isinstance(data, list):
        raise ConfigError(f"{options.dataset_path} holds no list of conversations", param="dataset_path")
    return data


@dataclass(frozen=True)
class _Row:
    """An object of a JSONL file. Its methods raise ConfigErrors that name the line."""

    path: str
    line: int
    fields: dict[str, Any]

    def text(self, key: str) -> str:
        value = self._need(key)
        return value if isinstance(value, str) else self._refuse(key, value, "a text")

    def number(self, key: str) -> float:
        value = self._need(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_TIME:
            return float(value)
        self._refuse(key, value, "a number")

    def count(self, key: str) -> int:
        value = self.number(key)
        is_legal = 1 <= value <= MAX_TOKENS
        return int(value) if is_legal else self._refuse(key, self.fields[key], f"1 to {MAX_TOKENS:,}")

    def items(self, key: str) -> list[Any]:
        value = self.fields.get(key, [])
        return value if isinstance(value, list) else self._refuse(key, value, "a list")

    def _need(self, key: str) -> Any:
        if key not in self.fields:
            raise ConfigError(
                f"Line {self.line} of {self.path} has no {key!r}", value=sorted(self.fields), param="dataset_path"
            )
        return self.fields[key]

    def _refuse(self, key: str, value: Any, expected: str) -> NoReturn:
        raise ConfigError(
            f"Illegal {key!r} on line {self.line} of {self.path}", value=value, expected=expected, param="dataset_path"
        )


def _read_lines(options: Workload) -> list[_Row]:
    rows = []
    for line, text in enumerate(_read(options).split("\n"), 1):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ConfigError(f"Line {line} of {options.dataset_path} is no JSON object", param="dataset_path")
        rows.append(_Row(str(options.dataset_path), line, fields))
    return rows
