"""Memory for the texts in which drafts are searched: planned, and no more is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire import demo
from quire.config import EngineConfig
from quire.engine.bring_up import plan_least
from quire.model_config import load_model_config
from quire.planning.memory_plan import KvPages, MemoryFacts
from quire.resolve import DeviceFacts, GpuFacts, resolve
from quire.scheduler.from_settings import proposer_of
from quire.settings import Planned
from quire.spec_decode.ngram import NgramProposer
from quire.spec_decode.suffix import SuffixProposer
from quire.speculative_config import SUFFIX_SHARED_BYTES, SpeculativeConfig, text_index_bytes
from tests.spec_decode.requests import request

GIB = 1 << 30
MODEL = load_model_config(demo.path("target"))
CPU = DeviceFacts("cpu", "test", "avx2", 4, 8 * GIB, 8 * GIB)
GPU = replace(CPU, gpu=GpuFacts("fake", 90, 8 * GIB, 8 * GIB))
MEMORY = MemoryFacts(8 * GIB, 4 * GIB, GIB, GIB // 2, 1 << 20)

CONFIGS = (
    SpeculativeConfig(method="ngram"),
    SpeculativeConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=32),
    SpeculativeConfig(method="suffix"),
    SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=0),
)


def plan(speculation: SpeculativeConfig | None, device: DeviceFacts, memory: MemoryFacts = MEMORY) -> Planned:
    config = EngineConfig(speculative_config=speculation, max_num_seqs=16)
    resolved = resolve(config, MODEL, device, is_server=True)
    return plan_least(config, [MODEL], resolved, [memory])[0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_an_index_takes_no_more_than_is_planned(config: SpeculativeConfig) -> None:
    proposer = proposer_of(config)
    assert isinstance(proposer, NgramProposer | SuffixProposer)
    shared = 0 if isinstance(proposer, NgramProposer) else proposer.shared_bytes
    num_bytes, num_tokens = shared, 0
    for index, length in enumerate((33, 1000, 1025, 5000)):
        asked = request(str(index), list(range(length)))
        for token in range(20):
            proposer.propose(asked, 4)
            asked.output_token_ids.append(token)
        kept = proposer._indexes[asked.request_id]
        num_bytes += (kept[1] if isinstance(kept, tuple) else kept).num_bytes
        num_tokens += asked.num_tokens
    assert 0.2 * text_index_bytes(config, num_tokens) < num_bytes <= text_index_bytes(config, num_tokens)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_it_is_a_line_of_the_plan(config: SpeculativeConfig) -> None:
    found, without = plan(config, CPU), plan(None, CPU)
    most = 16 * found.model.max_model_len
    texts = found.settings["draft_text_bytes"].value
    assert texts == text_index_bytes(config, most)
    assert found.memory.work_bytes - without.memory.work_bytes == texts
    assert found.memory.unplanned_bytes == 4 * GIB - found.memory.kv_cache_bytes - GIB // 2 - texts
    assert "draft_text_bytes" not in without.settings


def test_of_a_gpu_it_takes_nothing() -> None:
    found, without = plan(CONFIGS[2], GPU), plan(None, GPU)
    assert found.settings["draft_text_bytes"].value > SUFFIX_SHARED_BYTES
    assert "host memory" in found.settings["draft_text_bytes"].detail
    assert found.memory == without.memory


def test_texts_are_not_longer_than_the_kv_cache() -> None:
    """Where requests may be long and many, but memory is small."""
    memory = replace(MEMORY, free_bytes=600 << 20, work_bytes=1 << 20)
    found = plan(CONFIGS[0], CPU, memory)
    resolved = resolve(EngineConfig(max_num_seqs=16), MODEL, CPU, is_server=True)
    pages = KvPages.of(resolved, MODEL)
    num_tokens = (20 << 20) // pages.page_bytes * pages.block_size
    small = plan(CONFIGS[0], CPU, replace(memory, free_bytes=20 << 20, total_bytes=64 << 20))
    assert small.settings["draft_text_bytes"].value == text_index_bytes(CONFIGS[0], num_tokens)
    assert small.settings["draft_text_bytes"].value < found.settings["draft_text_bytes"].value
