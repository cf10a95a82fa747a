"""The sameness matrix over drafters: proposals change no token, logprob or finish reason.

The requests ask for everything that a draft could disturb: see test_drafts.KINDS. All end with the model's context,
unless a stop ends them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.sampling_params import SamplingParams
from quire.scheduler.from_settings import proposer_of
from quire.speculative_config import SpeculativeConfig
from tests.covering import covering
from tests.engine import heads
from tests.engine.harness import Prompt, Schedule, build_core, core_over, demo_draft, run
from tests.engine.test_drafts import KINDS, MOST, VOCAB_SIZE, Answer, answers
from tests.engine.test_sameness import BLOCK_SIZE, prompts
from tests.examples import IS_FULL
from tests.guesser import Guesser

TOKEN_IDS = prompts()[4].token_ids
MODEL_LEN = len(TOKEN_IDS) + MOST
FORMATS = (("bfloat16", "auto"), ("float32", "int8"), ("int8", "fp8_e4m3"), ("int4", "fp8_e5m2"), ("fp8", "auto"))
# Far below the defaults, so that text that hardly repeats is drafted too.
SEARCHES = {
    "ngram": SpeculativeConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3),
    "suffix": SpeculativeConfig(method="suffix", suffix_decoding_max_spec_factor=4.0),
}


@cache
def expected(precision: str, kv: str, is_mimo: bool, is_whole: bool) -> dict[str, Answer]:
    """Without drafts."""
    return answers(core_of(schedule_of(is_whole, kv_cache_dtype=kv), precision, is_mimo), list(KINDS))


@cache
def mimo(precision: str) -> heads.Pair:
    """With a layer that drafts the token which follows the last one most often in the answers."""
    following: dict[int, Counter[int]] = {}
    for tokens, *_ in expected("bfloat16", "auto", is_mimo=False, is_whole=True).values():
        for token, after in pairwise(tokens):
            following.setdefault(token, Counter())[after] += 1
    usual = {token: counter.most_common(1)[0][0] for token, counter in following.items()}
    return heads.load_mimo_for(MODEL_LEN, precision, heads.bigram_tensors(usual))


def core_of(schedule: Schedule, precision: str, is_mimo: bool) -> EngineCore:
    """A core over the demo model, or over the demo model as a MiMo."""
    if not is_mimo:
        return build_core(schedule, precision)
    pair = mimo(precision)
    return core_over(pair.config, pair.model, schedule, precision)


def schedule_of(is_whole: bool, **fields: Any) -> Schedule:
    return Schedule(max_num_seqs=len(KINDS), max_model_len=MODEL_LEN, is_whole=is_whole, **fields)


def knowing(right: float) -> Callable[[dict[str, Answer], str], dict[str, Any]]:
    """A drafter that knows the answers, and is right with this probability."""

    def drafting(wanted: dict[str, Answer], precision: str) -> dict[str, Any]:
        proposer = Guesser(right, vocab_size=VOCAB_SIZE)
        proposer.continuation_of = lambda name: wanted[name][0] if name in wanted else ()
        return {"proposer": proposer}

    return drafting


# Fields of Schedule, by the answers that are wanted and the precision.
DRAFTERS: dict[str, Callable[[dict[str, Answer], str], dict[str, Any]]] = {
    "never right": knowing(0.0),
    "randomly right": knowing(0.6),
    "always right": knowing(1.0),
    "ngram": lambda *_: {"proposer": proposer_of(SEARCHES["ngram"])},
    "suffix": lambda *_: {"proposer": proposer_of(SEARCHES["suffix"])},
    "draft_model": lambda *_: {
        "proposer": proposer_of(SpeculativeConfig(method="draft_model", model="any")),
        "draft": demo_draft(),
    },
    "eagle3": lambda _, precision: {
        "proposer": proposer_of(SpeculativeConfig(method="eagle3", model="any")),
        "draft": heads.load_for(MODEL_LEN, precision),
    },
    "mtp": lambda _, precision: {
        "proposer": proposer_of(SpeculativeConfig(method="mtp", model="any")),
        "draft": mimo(precision).draft,
    },
}


WITH_MODEL = [*DRAFTERS][-3:]  # their drafts hold for the whole demo model; the scheduler's own do for any
REST = ([None, -1, 0, 1], [17, 2048], [1, 2])


@pytest.mark.parametrize(
    ("drafter", "formats", "warm", "chunk", "depth"),
    [
        # Proposers without a model are the scheduler's, which knows no formats.
        *covering(
            [name for name in DRAFTERS if name not in WITH_MODEL], FORMATS, *REST, apart=[(0, 1), (0, 2), (1, 2)]
        ),
        *covering(WITH_MODEL, FORMATS, *REST, apart=[(1, 2), (1, 3), (1, 4)]),
    ],
)
def test_drafters(drafter: str, formats: tuple[str, str], warm: int | None, chunk: int, depth: int) -> None:
    """Every kind of request at once, some of it computed again.

    Args:
        formats: precision of the weights, and of the KV cache.
        warm: the prefix cache has two blocks of the prompt, and this number of tokens more; None: it has nothing.
    """
    precision, kv = formats
    is_mimo = drafter == "mtp"
    is_whole = IS_FULL or drafter in WITH_MODEL
    wanted = expected(precision, kv, is_mimo, is_whole)
    core = core_of(
        schedule_of(
            is_whole,
            kv_cache_dtype=kv,
            prefix_caching=warm is not None,
            chunk=chunk,
            depth=depth,
            waits=True,
            **DRAFTERS[drafter](wanted, precision),
        ),
        precision,
        is_mimo,
    )
    if warm is not None:
        known = TOKEN_IDS[: 2 * BLOCK_SIZE + warm]
        run(core, [Prompt(known, SamplingParams(temperature=0.0, max_tokens=1))], prefix="warm")
    num_drafts = num_held = 0

    def interfere(step: int) -> None:
        nonlocal num_drafts, num_held
        if step < 60 and step % 5 == 4 and core.scheduler.num_running:
            core.scheduler.preempt_last()
        if core.last_record is not None:
            num_drafts += core.last_record.num_draft_tokens
            num_held += core.last_record.num_accepted_tokens

    assert answers(core, list(KINDS), interfere) == wanted
    assert num_drafts > 20
    assert (num_held == 0) == (drafter == "never right")
