"""Groups of KV: the memory of layers of published shapes, by the formula and by the manager."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.formats.kv_format import KV_FORMATS
from quire.formats.kv_groups import KvGroup, kv_groups, num_tables, page_bytes, pages_alone, pages_for, table_of_layer
from quire.layer_spec.kv_spec import KvSpec
from quire.model_config import ModelConfig, load_model_config
from quire.planning.memory_plan import KvPages
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import NO_PAGE, KVCacheManager
from tests.models.test_model_config import GEMMA_2_2B, GEMMA_3_1B, GEMMA_3_4B, LLAMA_3_8B, MISTRAL_7B, PHI_3_MINI_4K

KV = KV_FORMATS["bfloat16"]
BLOCK_SIZE, STEP_TOKENS = 16, 512
GEMMA_3_27B = GEMMA_3_1B | {
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
}
# the model, layers with a window and without, layers that share a page
SHAPES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "Gemma 2 2B": (GEMMA_2_2B, 13, 13, 13),
    "Gemma 3 1B": (GEMMA_3_1B, 22, 4, 2),
    "Gemma 3 4B": (GEMMA_3_4B, 29, 5, 5),
    "Gemma 3 27B": (GEMMA_3_27B, 52, 10, 2),
    "Mistral 7B v0.1": (MISTRAL_7B, 32, 0, 32),
    "Phi-3 mini": (PHI_3_MINI_4K, 32, 0, 32),
    "Llama 3 8B": (LLAMA_3_8B, 0, 32, 32),
}


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], ModelConfig]:
    def write_and_load(name: str) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(SHAPES[name][0]))
        return load_model_config(tmp_path)

    return write_and_load


@pytest.mark.parametrize("name", SHAPES)
def test_layers_of_one_kind_share_a_group(name: str, load: Callable[[str], ModelConfig]) -> None:
    model = load(name)
    groups = kv_groups(model)
    _, num_windowed, num_full, per_page = SHAPES[name]
    assert {group.spec.kind: len(group.layers) for group in groups} == {
        kind: count for kind, count in (("window", num_windowed), ("full", num_full)) if count
    }
    assert {group.layers_per_page for group in groups} == {per_page}
    assert sorted(layer for group in groups for layer in group.layers) == list(range(model.num_layers))
    assert len(set(table_of_layer(groups))) == num_tables(groups)
    taken = num_tables(groups) * page_bytes(groups, KV, BLOCK_SIZE)
    assert taken <= 1.05 * BLOCK_SIZE * model.kv_bytes_per_token(KV)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("times", [2, 8, 32])
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape[1]])
def test_what_fits_is_what_the_formula_says(
    name: str, times: int, depth: int, load: Callable[[str], ModelConfig]
) -> None:
    """Requests and tokens in 1 TiB: pages that are not full, and layers that pad them, take less than a twentieth."""
    model = load(name)
    groups = kv_groups(model)
    pages = KvPages(groups, BLOCK_SIZE, STEP_TOKENS, depth, page_bytes(groups, KV, BLOCK_SIZE))
    specs = model.kv_specs()
    length = times * max(spec.window for spec in specs)
    formula = sum(spec.bytes_per_token(KV) * (spec.window or length) for spec in specs)
    num_pages = (1 << 40) // pages.page_bytes
    assert pages.num_requests(num_pages, length) >= 0.95 * ((1 << 40) // formula)
    assert pages.num_tokens(num_pages, length) >= 0.95 * length * (1 << 40) / formula


def test_the_longest_request_is_the_one_that_fits(load: Callable[[str], ModelConfig]) -> None:
    groups = kv_groups(load("Gemma 3 1B"))
    pages = KvPages(groups, BLOCK_SIZE, STEP_TOKENS, 1, page_bytes(groups, KV, BLOCK_SIZE))
    for num_pages in (1, 100, 1_000, 4_321):
        longest = pages.longest(num_pages)
        assert pages.for_request(longest) <= num_pages < pages.for_request(longest + 1)
    windowed = kv_groups(load("Mistral 7B v0.1"))
    for depth in (1, 2):
        pages = KvPages(windowed, BLOCK_SIZE, STEP_TOKENS, depth, 1)
        bound = (4096 + depth * STEP_TOKENS) // BLOCK_SIZE + 1
        assert pages.for_request(1 << 20) == bound, "the window and the steps in flight, whatever the length"
        assert pages.longest(bound) > 1 << 20


def group(kind: Any, window: int, num_layers: int, per_page: int) -> KvGroup:
    spec = KvSpec(kind=kind, num_kv_heads=1, head_dim_k=1, head_dim_v=1, window=window)
    return KvGroup(spec, tuple(range(num_layers)), per_page)


def request(name: str, num_tokens: int) -> Request:
    params = SamplingParams(max_tokens=1 << 20)
    return Request(name, list(range(num_tokens)), params, 1 << 20, frozenset())


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_hold_what_the_plan_says(depth: int) -> None:
    """Prompts in chunks until no further one is admitted: no more than the plan at any time, and as many requests."""
    groups = (group("window", 64, 22, 2), group("full", 0, 4, 2))
    length, chunk, count = 8 * 64, 32, 20
    pages = KvPages(groups, 16, chunk, depth, 1)
    pool = BlockPool(count * pages_for(groups, length, 16, depth), 16)
    kv = KVCacheManager(pool, groups, step_tokens=chunk, depth=depth, enable_prefix_caching=False)
    admitted = []
    while True:
        one = request(f"r{len(admitted)}", length)
        before = pool.num_used_blocks
        if kv.admit(one, kv.find_cached_prefix(one), length, keep_watermark=False) is None:
            break
        admitted.append(one)
        while one.num_computed_tokens < length:
            kv.extend(one, min(one.num_computed_tokens + chunk, length))
            assert kv.table(one).num_tokens >= min(one.num_computed_tokens + chunk, length)
            assert pool.num_used_blocks - before <= pages.for_request(length)
            one.num_computed_tokens = min(one.num_computed_tokens + chunk, length)
            one.num_settled_tokens = max(one.num_computed_tokens - (depth - 1) * chunk, 0)
        one.num_settled_tokens = length - depth + 1
        assert kv.extend(one, length + 1), "while it decodes it gives back before it takes"
        one.num_computed_tokens += 1
        kv.check()
    assert len(admitted) >= 0.95 * pages.num_requests(pool.num_blocks, length)
    (held,) = {len(kv.table(one).held()) for one in admitted}
    assert held == pages_for(groups, length + 1, 16, depth)
    dead = kv.table(admitted[0]).pages[: (length + 1 - 64) // 16 * 13]
    assert {page == NO_PAGE for page in dead[0::13]} == {True}
    for one in admitted:
        kv.free(one)
    assert pool.num_free_blocks == pool.num_blocks


def test_a_request_alone_has_a_page_of_its_own_for_all_that_a_step_reads() -> None:
    groups = (group("window", 5, 2, 1), group("full", 0, 1, 1))
    ids = pages_alone(groups, 40, 4, 6)
    assert set(ids) == set(range(pages_for(groups, 40, 4, 6)))
    for start in range(34):
        live = {
            (block, column)
            for column, first in enumerate((max(start - 4, 0), max(start - 4, 0), 0))
            for block in range(first // 4, -(-(start + 6) // 4))
        }
        assert len({ids[block * 3 + column] for block, column in live}) == len(live)
