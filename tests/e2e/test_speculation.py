"""Speculation as people meet it: a server and LLM(...) on the demo model, whose prompts stand twice in their text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from tests.e2e.serving import SMALL, Serve, quire

CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
# The next tokens stood there before, as long as the model repeats them.
PROMPT = "What does len() do? It returns the number of items of an object. " * 3
BODY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def test_server() -> None:
    """The first screen, an answer, /metrics and /v1/steps tell the same; the depth moves while serving."""
    flags = ("-sc", json.dumps(CONFIG), "--per-request-spec-decode-metrics", "detailed")
    often = {"VLLM_LOG_STATS_INTERVAL": "0.2"}
    with Serve(*SMALL, *flags, environment=often) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        assert "  drafts    ngram, at most 4 tokens a step (flag)\n" in server.log

        def answer(**fields: Any) -> dict[str, Any]:
            return dict(http.post("/v1/completions", json=BODY | fields).json())

        first = answer()
        drafts = first["metrics"]["speculative_decoding"]
        counted = _counters(http.get("/metrics").text)
        assert drafts["num_spec_steps"] == counted["num_drafts"] > 0
        assert drafts["num_draft_tokens"] == counted["num_draft_tokens"] == sum(drafts["per_step_drafted"])
        assert drafts["num_accepted_draft_tokens"] == counted["num_accepted_tokens"] > 0
        assert drafts["num_spec_tokens"] == 4
        steps = [json.loads(line) for line in http.get("/v1/steps?limit=1000").text.splitlines()]
        assert sum(step["draft_tokens"] for step in steps) == drafts["num_draft_tokens"]

        assert http.post("/v1/config", json={"spec_tokens": 0}).status_code == 200
        second = answer()
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        assert second["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
        server.wait_for(lambda: "SpecDecoding metrics: Mean acceptance length: " in server.log, "the statistics line")
        assert server.stop() == 0


def _counters(text: str) -> dict[str, float]:
    """Of drafts, by the ends of their names."""
    start = "vllm:spec_decode_"
    families = text_string_to_metric_families(text)
    return {family.name.removeprefix(start): family.samples[0].value for family in families if start in family.name}


def test_llm() -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"kv_cache_memory_bytes": "32M", "num_threads": 1, "dtype": "float32"}
    (plain,) = LLM(**options).generate(PROMPT, params)
    llm = LLM(**options, speculative_config=CONFIG, per_request_spec_decode_metrics="summary")
    (drafted,) = llm.generate(PROMPT, params)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert plain.outputs[0].spec_decode_metrics is None
    assert drafted.outputs[0].spec_decode_metrics is not None
    assert drafted.outputs[0].spec_decode_metrics.to_dict()["num_spec_steps"] > 0


def test_a_mistake_ends_the_start() -> None:
    done = quire("serve", "--speculative-config", '{"method": "ngramm"}')
    assert done.returncode == 2
    assert "Unknown method 'ngramm' in speculative_config" in done.stderr
    assert "Did you mean 'ngram'?" in done.stderr
    with pytest.raises(ConfigError, match="Unknown method 'ngramm'"):
        LLM(speculative_config={"method": "ngramm"})
