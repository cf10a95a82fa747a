"""Requests for proposers."""

from __future__ import annotations

from typing import Any

from quire.request import Request
from quire.sampling_params import SamplingParams


def request(request_id: str, prompt: list[int], **fields: Any) -> Request:
    return Request(request_id, prompt, SamplingParams(), 1000, frozenset(), **fields)
