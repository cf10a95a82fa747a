"""Requests for proposers, and texts that repeat themselves."""

from __future__ import annotations

from itertools import chain
from typing import Any

from hypothesis import strategies as st

from quire.request import Request
from quire.sampling_params import SamplingParams

# Few different tokens, or pieces that come again.
_PIECES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=4)
TEXTS = st.one_of(
    st.lists(st.integers(0, 2), max_size=120),
    _PIECES.flatmap(lambda pieces: st.lists(st.sampled_from(pieces), max_size=12)).map(lambda some: [*chain(*some)]),
)


def request(request_id: str, prompt: list[int], **fields: Any) -> Request:
    return Request(request_id, prompt, SamplingParams(), 1000, frozenset(), **fields)
