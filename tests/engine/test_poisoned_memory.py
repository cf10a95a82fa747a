"""Memory that torch hands out unwritten is filled with NaN and other marks: no token and no logprob may depend on
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from quire.messages import AddRequest
from tests.engine import harness
from tests.engine.harness import EOS, Schedule, build_core
from tests.engine.test_sameness import prompts

WORDS = ("empty", "empty_like", "empty_strided")
METHODS = ("new_empty", "new_empty_strided")


def _poison(function: Callable[..., torch.Tensor], count: list[int]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = function(*args, **kwargs)
        count[0] += 1
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(255 if tensor.dtype is torch.uint8 else -1)

    return poisoned


@contextmanager
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yields the number of filled tensors, in a list of one. The model is loaded anew inside."""
    count = [0]
    with monkeypatch.context() as patch:
        patch.setattr(harness, "demo_model", cache(harness.demo_model.__wrapped__))
        for owner, names in ((torch, WORDS), (torch.Tensor, METHODS)):
            for name in names:
                patch.setattr(owner, name, _poison(getattr(owner, name), count))
        yield count


def _everything(precision: str, schedule: Schedule) -> dict[str, list[Any]]:
    """Tokens and logprobs of each request, the prompt's included."""
    core = build_core(schedule, precision)
    for index, prompt in enumerate(prompts()):
        params = prompt.params.clone()
        params.logprobs, params.prompt_logprobs = (0, 3, 20)[index % 3], (None, 0, 5)[index % 3]
        params.presence_penalty, params.min_p = 0.1 * index, 0.01 * index
        core.add(AddRequest(f"r{index}", list(prompt.token_ids), params, 24, stop_token_ids=[EOS]))
    found: dict[str, list[Any]] = {}
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            found.setdefault(delta.request_id, []).append((delta.token_ids, delta.logprobs, delta.prompt_logprobs))
    core.shutdown()
    return found


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("schedule", [Schedule(chunk=7), Schedule(depth=2, prefix_caching=True)], ids=["chunks", "two"])
def test_unwritten_memory_changes_nothing(schedule: Schedule, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _everything(precision, schedule)
    with poisoned_memory(monkeypatch) as count:
        assert _everything(precision, schedule) == expected
    assert count[0] > 100, "nothing was poisoned"


def test_the_poison_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    with poisoned_memory(monkeypatch):
        assert torch.empty(2, 3).isnan().all()
        assert (torch.zeros(2).new_empty((4,), dtype=torch.int64) == -1).all()
