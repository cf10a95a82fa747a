"""What the demo model says to one question."""

from __future__ import annotations

from functools import cache
from typing import Any

from quire import LLM, SamplingParams


def answer(**arguments: Any) -> str:
    """Of a model with these arguments."""
    llm = LLM(**{"kv_cache_memory_bytes": 1 << 24, "num_threads": 1} | arguments)
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    return llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text


@cache
def answer_in_floating_point() -> str:
    """Of the demo model as it is."""
    text = answer()
    assert text.startswith("`os.path.join(")
    return text
