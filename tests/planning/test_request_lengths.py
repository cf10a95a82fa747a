"""The number of requests that fit: the formulas beside a running server of pages, request by request."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.model_config import load_model_config
from quire.planning.memory_plan import KvPages
from quire.planning.request_lengths import RequestLength, RequestLengths
from quire.resolve import resolve
from tests.planning.goldens import HERE
from tests.real_models import write_config


def pages_of(folder: Path, name: str) -> KvPages:
    model = load_model_config(write_config(folder, name))
    return KvPages.of(resolve(EngineConfig(model="m"), model, HERE, is_server=True), model)


def test_resident_tokens() -> None:
    """Long answers count more often: 10 of 1,000 tokens hold the cache for longer than 10 of 10."""
    assert RequestLengths("one", [RequestLength(100, 50)]).resident_tokens() == 125
    mixed = RequestLengths("two", [RequestLength(100, 10), RequestLength(100, 1000)])
    assert mixed.resident_tokens() == pytest.approx((100 * 10 + 50 + 100 * 1000 + 500_000) / 1010)
    assert mixed.longest == 1100
    assert mixed.share_longer_than(1099) == 0.5
    assert mixed.with_half_prompts().mean_prompt == 50


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Gemma-2-9B"])
def test_as_many_fit_as_a_running_server_holds(name: str, tmp_path: Path) -> None:
    """Slots whose requests follow each other: pages run out in about one step of a hundred, windows included."""
    rng = random.Random(1)
    pages = pages_of(tmp_path, name)
    requests = [RequestLength(rng.randint(50, 6000), rng.randint(1, 400)) for _ in range(400)]
    num_pages = 40 * pages.while_decoding(3200)
    fit = RequestLengths("random", requests).that_fit(pages, num_pages)
    held = {}

    def taken(length: int) -> int:
        if length not in held:
            held[length] = pages.while_decoding(length)
        return held[length]

    slots = [[request.prompt + rng.randrange(request.output), request] for request in rng.choices(requests, k=fit)]
    short = 0
    num_steps = 3000
    for step in range(num_steps + 500):
        for slot in slots:
            slot[0] += 1
            if slot[0] > slot[1].total:
                request = rng.choice(requests)
                slot[:] = [request.prompt + 1, request]
        short += step >= 500 and sum(taken(length) for length, _ in slots) > num_pages
    assert short / num_steps < 0.06, "a rare shortage"
    assert sum(taken(length) for length, _ in slots) > 0.7 * num_pages, "and hardly any page is idle"


def test_equal_requests(tmp_path: Path) -> None:
    """n mean + 2.33 spread sqrt(n) = N, in pages of 16 tokens."""
    pages = pages_of(tmp_path, "Llama-3.1-8B")
    lengths, num_pages = RequestLengths("one", [RequestLength(1024, 512)]), 10_000
    fit = lengths.that_fit(pages, num_pages)
    mean, spread = 1280 / 16, 512 / 16 / math.sqrt(12)
    assert fit * mean + 2.33 * spread * math.sqrt(fit) == pytest.approx(num_pages, rel=0.02)
