"""`--kv-cache-dtype` in the engine: the demo model keeps its answers, natively and through transformers' code."""

from __future__ import annotations

from functools import cache

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError

FUNCTIONS = [
    "os.path.join", "heapq.heappush", "random.shuffle", "functools.lru_cache", "itertools.chain", "json.dumps",
    "re.compile", "math.sqrt", "shutil.copy", "textwrap.wrap", "bisect.insort", "statistics.mean", "glob.glob",
    "time.sleep", "copy.deepcopy", "pickle.loads", "base64.b64encode", "struct.pack", "os.listdir", "random.choice",
    "functools.reduce", "itertools.product", "heapq.nlargest", "math.gcd",
]  # fmt: skip
# Share of greedy answers of up to 60 tokens that the cache in the model's dtype gives word for word.
SAME_ANSWERS = {"fp8": 0.9, "fp8_e5m2": 0.8, "int8": 0.95}


@cache
def answers(dtype: str, kv_cache_dtype: str, model_impl: str = "auto") -> list[str]:
    llm = LLM(
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        model_impl=model_impl,
        kv_cache_memory_bytes=1 << 24,
        num_threads=1,
        max_model_len=512,
    )
    chats = [[{"role": "user", "content": f"What does {name} do?"}] for name in FUNCTIONS]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def share_alike(found: list[str], expected: list[str]) -> float:
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [
        *(("bfloat16", kv) for kv in SAME_ANSWERS),
        ("float32", "int8"),
        *(pytest.param("float32", kv, marks=pytest.mark.slow) for kv in ("fp8", "fp8_e5m2")),
    ],
)
def test_the_demo_model_keeps_its_answers(dtype: str, kv_cache_dtype: str) -> None:
    expected = answers(dtype, "auto")
    assert len(set(expected)) == len(FUNCTIONS)
    assert share_alike(answers(dtype, kv_cache_dtype), expected) >= SAME_ANSWERS[kv_cache_dtype]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_through_transformers(kv_cache_dtype: str) -> None:
    found = answers("float32", kv_cache_dtype, "transformers")
    assert share_alike(found, answers("float32", "auto")) >= SAME_ANSWERS[kv_cache_dtype]


def test_the_same_bytes_hold_twice_the_tokens() -> None:
    """As much of the cache as was planned is there, and serves."""
    blocks = {
        kv: LLM(
            kv_cache_dtype=kv, kv_cache_memory_bytes=1 << 22, num_threads=1, max_model_len=256
        ).resolved.memory.num_blocks
        for kv in ("auto", "fp8")
    }
    assert blocks["fp8"] == 2 * blocks["auto"]


def test_another_dtype_than_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no KV cache in float16") as caught:
        LLM(dtype="bfloat16", kv_cache_dtype="float16")
    assert caught.value.param == "kv_cache_dtype"
