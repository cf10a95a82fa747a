"""Requests that want a vector of their prompt, and no token."""

from __future__ import annotations

import pytest

from tests.scheduler.driver import Driver, request
from tests.scheduler.test_sameness import mixed, prompt


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_vector_ends_its_request_and_depends_on_the_prompt_alone(chunk: int, depth: int) -> None:
    vectors = []
    for neighbours in ([], mixed()):
        driver = Driver(long_prefill_token_threshold=chunk, depth=depth)
        for index in (1, 2, 1):
            name = f"vector{len(driver.messages)}"
            driver.add(request(name, prompt(12, index), max_tokens=1, wants_vector=True))
        names = list(driver.messages)
        for message in neighbours:
            driver.add(message)
        driver.run()
        driver.check_outputs(except_for=names)
        for name in names:
            (delta,) = driver.deltas[name]
            assert (delta.finish_reason, delta.error, delta.token_ids) == ("stop", None, [])
        vectors.append([driver.last(name).vector for name in names])
    assert vectors[0] == vectors[1]
    first, second, again = vectors[0]
    assert first == again != second
    assert first
