"""Speculative decoding as the user wants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"]
BY_WORKER: tuple[SpeculativeMethod, ...] = ("draft_model", "eagle3", "mtp")  # their drafter is a model


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter guesses at the next tokens, and how far. Names and meanings are vLLM's, but for `adaptive`.

    Attributes:
        method: ngram: the text of the request itself; suffix: also the texts of other requests; draft_model: a smaller
            model; eagle3, mtp: heads on the target's hidden states.
        num_speculative_tokens: most drafts of one request in one step. With `adaptive` it is a bound, else the depth.
        num_speculative_tokens_per_batch_size: (first, last, most drafts) of so many running requests.
        model: checkpoint of the drafter, a folder or a name on the hub.
        revision: of that checkpoint on the hub.
        quantization, kv_cache_dtype, max_model_len: of the drafter; None: as the target's.
        draft_load_config: as EngineConfig.load_format and its like, for the drafter.
        draft_sample_method: how a model drafts; None: with the draws of the target.
        draft_tensor_parallel_size: devices of the drafter; 1 in this version.
        prompt_lookup_min, prompt_lookup_max: tokens of the pattern that ngram looks for.
        suffix_decoding_max_tree_depth: most tokens of a pattern and its continuation together.
        suffix_decoding_max_cached_requests: requests whose outputs suffix keeps.
        suffix_decoding_max_spec_factor: most drafts for each token of the pattern that was found.
        suffix_decoding_min_token_prob: a draft is proposed if its estimated probability is not less.
        rejection_sample_method: standard: a draft holds if the target samples it; synthetic: it holds at random, for
            benchmarks only, because that changes the tokens.
        synthetic_acceptance_rates: of synthetic, a share of drafts that hold per position.
        adaptive: choose the depth of each request from what held and what a step costs.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int = 7  # with the newest token, they are the 8 rows of a tile
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    draft_load_config: Mapping[str, Any] | None = None
    draft_sample_method: str | None = None
    draft_tensor_parallel_size: int = 1
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: tuple[float, ...] = ()
    adaptive: bool = True
