"""The user's settings of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"]


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The drafter and the number of its drafts. Names and meanings are vLLM's, except `adaptive`.

    Attributes:
        method: ngram: the text of the request itself; suffix: also the texts of other requests; draft_model: a smaller
            model; eagle3, mtp: heads on the target's hidden states.
        num_speculative_tokens: drafts of one request in one step; with `adaptive`, the largest number.
        num_speculative_tokens_per_batch_size: (first, last, most drafts) for `first` to `last` running requests.
        model: checkpoint of the drafter, a folder or a name on the hub.
        revision: revision of this checkpoint on the hub.
        quantization, kv_cache_dtype, max_model_len: of the drafter; None: the same as for the target.
        draft_load_config: EngineConfig.load_format and similar fields, for the drafter.
        draft_sample_method: how a model samples drafts; None: with the draws of the target.
        draft_tensor_parallel_size: devices of the drafter; 1 in this version.
        prompt_lookup_min, prompt_lookup_max: numbers of tokens of the pattern that ngram searches.
        suffix_decoding_max_tree_depth: most tokens of a pattern and its continuation together.
        suffix_decoding_max_cached_requests: number of requests with outputs that suffix keeps.
        suffix_decoding_max_spec_factor: most drafts for each token of the pattern that was found.
        suffix_decoding_min_token_prob: a draft is proposed if its estimated probability is at least this.
        rejection_sample_method: standard: a draft holds if the target samples it; synthetic: it holds at random, for
            benchmarks only, because this changes the tokens.
        synthetic_acceptance_rates: for synthetic, the share of drafts that hold, per position.
        adaptive: choose the depth of each request from earlier drafts that held and from the time of a step.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int = 7  # with the newest token, 8 rows, which is a tile
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
