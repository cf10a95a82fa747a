"""A model's engine is killed while it streams answers of every kind. The next one goes on with the same tokens."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import SMALL, START_SECONDS, Serve

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LENGTH = 250
HELLO: dict[str, Any] = {"prompt": "Hello", "max_tokens": LENGTH, "ignore_eos": True, "seed": 5}
MESSAGES = [{"role": "user", "content": "how to sort a list"}]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, HELLO | {"temperature": 0}),
    "sampled": (COMPLETIONS, HELLO | {"temperature": 1.3, "top_p": 0.9, "min_p": 0.01}),
    "several": (COMPLETIONS, HELLO | {"n": 3}),
    "logprobs": (COMPLETIONS, HELLO | {"logprobs": 3, "prompt_logprobs": 2, "echo": True}),
    "penalties": (COMPLETIONS, HELLO | {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2}),
    "least": (COMPLETIONS, HELLO | {"ignore_eos": False, "temperature": 0, "min_tokens": LENGTH - 5}),
    "bad words": (COMPLETIONS, HELLO | {"bad_words": ["the", "of"], "logit_bias": {"7": 2.0}}),
    "regex": (COMPLETIONS, HELLO | {"structured_outputs": {"regex": r"([0-9]{3} and then ){60}"}}),
    "chat": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": LENGTH, "min_tokens": LENGTH - 5, "seed": 3, "logprobs": True},
    ),
}


def streamed(server: Serve, name: str, began: threading.Event) -> dict[str, Any]:
    """Text, logprobs and ends of each choice, and the usage. `began`: set when some text has come."""
    path, body = KINDS[name]
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    texts: dict[int, str] = {}
    found: dict[str, Any] = {"logprobs": [], "ends": {}}
    with httpx.stream("POST", server.url + path, json=body, timeout=START_SECONDS) as response:
        assert response.status_code == 200, response.read()
        for line in filter(None, response.iter_lines()):
            if (data := line.removeprefix("data: ")) == "[DONE]":
                break
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                index = choice["index"]
                text = choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or ""
                texts[index] = texts.get(index, "") + text
                found["ends"] |= {index: choice["finish_reason"]} if choice["finish_reason"] else {}
                if (logprobs := choice.get("logprobs")) is not None:
                    found["logprobs"] += logprobs.get("content") or logprobs["token_logprobs"]
            found["usage"] = event.get("usage") or found.get("usage")
            if any(len(text) > 20 for text in texts.values()):
                began.set()
    return found | {"texts": texts}


def all_streamed(server: Serve, kills: bool) -> dict[str, dict[str, Any]]:
    """The answers to all kinds at once. An engine is killed when all have begun."""
    events = {name: threading.Event() for name in KINDS}
    with ThreadPoolExecutor(len(KINDS)) as pool:
        futures = {name: pool.submit(streamed, server, name, events[name]) for name in KINDS}
        for event in events.values():
            assert event.wait(60)
        if kills:
            assert not any(future.done() for future in futures.values()), "an answer was too short to be disturbed"
            server.engines[0].send_signal(signal.SIGKILL)
        return {name: future.result() for name, future in futures.items()}


def restarts(server: Serve) -> list[float]:
    families = text_string_to_metric_families(server.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    found = [
        each for each in samples if each.name == "quire_engine_restarts_total" and each.labels["reason"] == "crash"
    ]
    return sorted(sample.value for sample in found)


@pytest.fixture(params=[1, 2])
def server(request: pytest.FixtureRequest) -> Iterator[Serve]:
    with Serve(*SMALL, "-dp", str(request.param)) as server:
        yield server


def test_every_kind_of_answer(server: Serve) -> None:
    """With one engine, and with two: then the other one goes on."""
    undisturbed = all_streamed(server, kills=False)
    usages = {name: answer["usage"]["completion_tokens"] for name, answer in undisturbed.items()}
    assert all(count >= LENGTH - 5 for count in usages.values()), usages
    assert all_streamed(server, kills=True) == undisturbed
    *others, last = restarts(server)
    assert last == 1
    assert not any(others), "an engine that was well was started again"
