"""Long work on large bodies runs outside the event loop's thread, and the loop's lag is measured."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import sampling_params
from quire.frontend import async_engine, grammar_pool, infill
from quire.frontend.input_processor import InputProcessor
from quire.frontend.logprobs import LogprobDecoder
from quire.frontend.tokenizer import Tokenizer
from quire.server import completions, limits, loop_lag
from quire.server.logprobs import LogprobWriter
from quire.server.text import tagged_calls
from quire.server.tool_choice import ToolChoice
from tests.server.serving import RunningServer
from tests.server.test_errors import CHAT, COMPLETIONS, JSON, MESSAGES, error_of

LONG_PROMPT = {"prompt": "a " * 300}
STRICT = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALLED = {"type": "function", "function": {"name": "f", "parameters": STRICT["parameters"]}}
STRICT_TOOLS = {"messages": MESSAGES, "max_tokens": 1, "tools": [{"type": "function", "function": STRICT}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#/none"}}}  # refused, by a process
MANY_IDS = [*range(4_000), *[5] * 1_000]
LONG_CHAT = {"messages": [{"role": "user", "content": "a " * 300}]}


@pytest.fixture(scope="module")
def large() -> Iterator[RunningServer]:
    with RunningServer(answer=None) as server:
        server.app.state.quire.infill_format = infill._FORMATS[infill._CODE_LLAMA]
        yield server
        server.wait_for_idle()


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """The threads a function is called in from now on."""
    original: Callable[..., Any] = getattr(owner, name)
    threads: list[int] = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)
    return threads


@pytest.mark.parametrize(
    ("path", "body", "owner", "name"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300_000}]}, limits, "check_nesting"),
        (CHAT, {"messages": MESSAGES, "x": [[[]] * 2_000] * 40}, limits, "check_nesting"),
        (COMPLETIONS, {"prompt": [5] * 5_000}, completions, "split_prompts"),
        (COMPLETIONS, {"prompt": [5] * 5_000}, InputProcessor, "process"),
        (COMPLETIONS, {"prompt": "a " * 4000, "truncate_prompt_tokens": 5, "max_tokens": 1}, InputProcessor, "process"),
        (COMPLETIONS, {"prompt": "a " * 900, "suffix": "b", "max_tokens": 1}, InputProcessor, "encode"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "allowed_token_ids": MANY_IDS}, sampling_params, "plain_list"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "allowed_token_ids": MANY_IDS}, InputProcessor, "process"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "allowed_token_ids": MANY_IDS}, sampling_params, "plain_list"),
        (CHAT, {"messages": MESSAGES, "response_format": SCHEMA}, grammar_pool, "framed"),
        (CHAT, STRICT_TOOLS, ToolChoice, "of"),
        ("/v1/responses/input_tokens", {"input": "a", "tools": [STRICT | {"type": "function"}]}, ToolChoice, "of"),
        ("/tokenize", {"prompt": "a " * 4000}, Tokenizer, "encode"),
        ("/tokenize", {"prompt": "a " * 4000, "return_token_strs": True}, Tokenizer, "id_to_token"),
        ("/detokenize", {"tokens": [5] * 5_000}, Tokenizer, "decode"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 500, "logprobs": 20}, LogprobWriter, "completion"),
        (
            COMPLETIONS,
            {"prompt": "a", "max_tokens": 60, "logprobs": 1, "logprob_token_ids": [*range(100)], "ignore_eos": True},
            LogprobWriter,
            "completion",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "max_tokens": 500, "ignore_eos": True, "logprobs": True, "top_logprobs": 20},
            LogprobWriter,
            "chat",
        ),
        *(
            (
                path,
                {**prompt, "prompt_logprobs": 20, "max_tokens": 2, "stream": is_streamed},
                LogprobDecoder,
                "position",
            )
            for path, prompt in ((COMPLETIONS, LONG_PROMPT), (CHAT, LONG_CHAT))
            for is_streamed in (False, True)
        ),
        (
            COMPLETIONS,
            {**LONG_PROMPT, "logprobs": 20, "echo": True, "max_tokens": 1, "stream": True},
            LogprobWriter,
            "completion",
        ),
    ],
)
def test_large_bodies_do_not_run_on_the_event_loop(large, monkeypatch, path, body, owner, name):
    monkeypatch.setattr(async_engine, "INLINE_PROMPT_CHARS", 3_000)  # this vocabulary is small
    threads = spy(monkeypatch, owner, name)
    response = large.http.post(path, content=json.dumps(body).encode(), headers=JSON)
    if response.status_code != 200:
        error_of(response, 400)
    assert threads, f"{name} was not called"
    assert large.run(threading.get_ident) not in threads, f"{name} ran on the event loop"
    assert large.http.get("/health").status_code == 200


def test_others_have_their_turns_between_the_prompts_of_a_request(large, monkeypatch):
    """However many prompts there are, and however fast each is."""
    processed = spy(monkeypatch, InputProcessor, "process")
    is_over = threading.Event()
    num_processed: list[int] = []

    async def take_turns() -> None:
        while not is_over.is_set():
            num_processed.append(len(processed))
            await asyncio.sleep(0)

    turns = asyncio.run_coroutine_threadsafe(take_turns(), large.loop)
    answer = large.complete(prompt=["a"] * 1024, max_tokens=1, return_token_ids=True)
    is_over.set()
    turns.result(10)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 1024 == num_processed[-1]
    assert max(after - before for before, after in itertools.pairwise(num_processed)) <= 2


def test_lag_is_measured(large):
    """A loop that is held up for a known time is reported with at least that time."""
    late: list[float] = []

    async def hold_up() -> None:
        task = asyncio.create_task(loop_lag.watch(late.append))
        await asyncio.sleep(0)
        threading.Event().wait(loop_lag.INTERVAL_SECONDS + 0.05)
        while not late:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(hold_up())
    assert late[0] >= 0.05
    large.wait_for(
        lambda: large.metric("quire_event_loop_lag_seconds_count", engine=None) >= 2, "two looks at the loop"
    )


def test_the_tools_of_a_request_are_read_once(large, monkeypatch):
    """However many continuations there are: reading large schemas takes half a second."""
    read = spy(monkeypatch, tagged_calls, "json_types")
    body = {"messages": MESSAGES, "max_tokens": 1, "n": 8, "tools": [CALLED]}
    with RunningServer(enable_auto_tool_choice=True, tool_call_parser="hermes") as server:
        assert len(server.http.post(CHAT, json=body).json()["choices"]) == 8
        loop = server.run(threading.get_ident)
    assert len(read) == 1, "the only parameter was read for every continuation"
    assert loop not in read, "the tools were read on the event loop"
