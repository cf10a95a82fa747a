"""The user's settings of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from quire.errors import ConfigError

SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"]
METHODS: tuple[SpeculativeMethod, ...] = get_args(SpeculativeMethod)
BY_WORKER: tuple[SpeculativeMethod, ...] = ("draft_model", "eagle3", "mtp")  # their drafter is a model
MOST_DRAFTS = 255  # the most drafts of one request in one step
LEAST_LOGITS_ROWS = 32  # rows that a step with drafts may have, even if few requests run
# Of the text of a running request: of each token, and of each length of n-grams beside.
NGRAM_TOKEN_BYTES, NGRAM_BYTES, SUFFIX_TOKEN_BYTES = 8, 16, 72
SUFFIX_SHARED_BYTES = 80 << 20  # the most host memory for the outputs that suffix keeps: 2 million tokens

_OF_ALL = (
    "method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "rejection_sample_method",
    "synthetic_acceptance_rates", "adaptive",
)  # fmt: skip
_OF_MODELS = (
    "model", "revision", "quantization", "kv_cache_dtype", "max_model_len", "draft_load_config", "draft_sample_method",
    "draft_tensor_parallel_size",
)  # fmt: skip
_OF_METHOD: dict[SpeculativeMethod, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "draft_model": _OF_MODELS,
    "eagle3": _OF_MODELS,
    "mtp": _OF_MODELS[2:],
}  # fmt: skip
_LEAST = {
    "num_speculative_tokens": 1,
    "draft_tensor_parallel_size": 1,
    "max_model_len": 1,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 1,
    "suffix_decoding_max_tree_depth": 1,
    "suffix_decoding_max_cached_requests": 0,
}
_MAY_BE_NONE = ("max_model_len", "draft_tensor_parallel_size")
_MOST = {
    "num_speculative_tokens": MOST_DRAFTS,
    "prompt_lookup_max": 32,  # each length of n-grams costs time and memory
    "suffix_decoding_max_tree_depth": 1024,
    "suffix_decoding_max_cached_requests": 1 << 31,  # as in vLLM
}
_CHOICES = {
    "method": METHODS,
    "draft_sample_method": (None, "greedy", "probabilistic"),
    "rejection_sample_method": ("standard", "synthetic"),
    "adaptive": (True, False),
}


def text_index_bytes(config: SpeculativeConfig | None, num_tokens: int) -> int:
    """Bytes of the host's memory for what a method searches, at most.

    Args:
        num_tokens: the tokens of the texts of all running requests.
    """
    if config is None or config.method in BY_WORKER:
        return 0
    if config.method == "ngram":
        num_lengths = config.prompt_lookup_max - config.prompt_lookup_min + 1
        return num_tokens * (NGRAM_TOKEN_BYTES + num_lengths * NGRAM_BYTES)
    shared = SUFFIX_SHARED_BYTES if config.suffix_decoding_max_cached_requests else 0
    return shared + num_tokens * SUFFIX_TOKEN_BYTES


def keys_of(method: SpeculativeMethod) -> tuple[str, ...]:
    """The fields that a method reads, in the order in which they are shown."""
    return (*_OF_ALL[:2], *_OF_METHOD[method], *_OF_ALL[2:])


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The drafter and the number of its drafts. Names and meanings are vLLM's, except `adaptive`.

    Raises ConfigError for an illegal value.

    Attributes:
        method: ngram: the text of the request itself; suffix: also the texts of other requests; draft_model: a smaller
            model; eagle3, mtp: heads on the target's hidden states.
        num_speculative_tokens: drafts of one request in one step; with `adaptive`, the largest number.
        num_speculative_tokens_per_batch_size: (first, last, most drafts) for `first` to `last` running requests.
        model: checkpoint of the drafter, a folder or a name on the hub.
        revision: revision of this checkpoint on the hub.
        quantization, kv_cache_dtype, max_model_len: of the drafter; None: the same as for the target.
        draft_load_config: an object with the key load_format, as EngineConfig.load_format, for the drafter.
        draft_sample_method: how a model samples drafts; None: it samples with the draws of the target.
        draft_tensor_parallel_size: ranks that share a draft model: 1 (each has all of it), or as many as share the
            model. None: all ranks that share the model, if they can share the drafter. Every rank has all of a head.
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
    num_speculative_tokens: int = 7  # with the newest token these are 8 rows, which are a tile
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    draft_load_config: Mapping[str, Any] | None = None
    draft_sample_method: str | None = None
    draft_tensor_parallel_size: int | None = None
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: tuple[float, ...] = ()
    adaptive: bool = True

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise self._illegal(name, "one of " + ", ".join(str(each) for each in choices if each is not None))
        for name, least in _LEAST.items():
            most = _MOST.get(name)
            value = getattr(self, name)
            is_number = type(value) is int and least <= value and (most is None or value <= most)
            if not is_number and (name not in _MAY_BE_NONE or value is not None):
                raise self._illegal(name, f"a whole number, {least} " + ("or more" if most is None else f"to {most}"))
        for name in ("model", "revision", "quantization", "kv_cache_dtype"):
            if not isinstance(getattr(self, name), str | None):
                raise self._illegal(name, "a text")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise self._illegal("prompt_lookup_min", f"at most prompt_lookup_max = {self.prompt_lookup_max}")
        if not _is_between(self.suffix_decoding_max_spec_factor, 0, 1e6):
            raise self._illegal("suffix_decoding_max_spec_factor", "a number, 0 or more")
        if not _is_between(self.suffix_decoding_min_token_prob, 0, 1):
            raise self._illegal("suffix_decoding_min_token_prob", "a number from 0 to 1")
        if not isinstance(self.draft_load_config, Mapping | None):
            raise self._illegal("draft_load_config", "an object with the key load_format")
        if unknown := self.draft_load_config and self.draft_load_config.keys() - {"load_format"}:
            raise self._illegal("draft_load_config", f"the key load_format alone, not {', '.join(sorted(unknown))}")
        if self.method in ("draft_model", "eagle3") and not self.model:
            raise ConfigError(
                f"Speculation by {self.method} needs a model that drafts",
                fix="Name its checkpoint: --spec-model, or the key model of --speculative-config",
                param="speculative_config",
            )
        self._check_schedule()
        self._check_synthetic()

    def _check_schedule(self) -> None:
        entries, last = self.num_speculative_tokens_per_batch_size, 0
        illegal = self._illegal(
            "num_speculative_tokens_per_batch_size",
            "[first, last, tokens] for numbers of running requests, in ascending order, each with 0 to "
            f"num_speculative_tokens = {self.num_speculative_tokens} tokens",
        )
        if not isinstance(entries, tuple):
            raise illegal
        for entry in entries:
            is_range = isinstance(entry, tuple) and len(entry) == 3 and all(type(number) is int for number in entry)
            if not is_range or not last < entry[0] <= entry[1] or not 0 <= entry[2] <= self.num_speculative_tokens:
                raise illegal
            last = entry[1]

    def _check_synthetic(self) -> None:
        rates = self.synthetic_acceptance_rates
        if self.rejection_sample_method == "standard":
            if rates:
                raise self._illegal(
                    "synthetic_acceptance_rates", "nothing, unless rejection_sample_method is synthetic"
                )
            return
        is_list = isinstance(rates, tuple) and len(rates) == self.num_speculative_tokens
        if not is_list or not all(
            _is_between(rate, 0, before) for before, rate in zip((1.0, *rates), rates, strict=False)
        ):
            raise self._illegal(
                "synthetic_acceptance_rates",
                f"{self.num_speculative_tokens} shares from 0 to 1, one per draft, none above the one before",
            )

    def _illegal(self, name: str, expected: str) -> ConfigError:
        value = getattr(self, name)
        return ConfigError(
            f"Illegal {name} in speculative_config", value=value, expected=expected, param="speculative_config"
        )

    def effective(self) -> dict[str, Any]:
        """The fields that have an effect, by name, for the screen and JSON."""
        shown = {name: getattr(self, name) for name in keys_of(self.method)}
        return {name: value for name, value in shown.items() if value is not None and value != ()}

    def describe(self) -> str:
        """One sentence about the effect, without a full stop."""
        does = {
            "ngram": "drafts what followed the last tokens where the request's own text had them before "
            f"({self.prompt_lookup_min} to {self.prompt_lookup_max} tokens have to be alike)",
            "suffix": "drafts what most often followed the last tokens in this request and in up to "
            f"{self.suffix_decoding_max_cached_requests:,} outputs before",
            "draft_model": f"{self.model} drafts",
            "eagle3": f"the EAGLE-3 head {self.model} drafts from the model's hidden states",
            "mtp": "the model's own layers for multi-token prediction draft",
        }[self.method]
        depth = "up to" if self.adaptive else "always"
        why = "as far as what held and what steps cost make it pay" if self.adaptive else "whatever it costs"
        kept = "a draft holds only if the model samples it, so no token changes"
        if self.rejection_sample_method == "synthetic":
            kept = "drafts hold at random (synthetic): the tokens are wrong, and only times mean something"
        return f"{does}; {depth} {self.num_speculative_tokens} tokens per request and step, {why}; {kept}"


FIELDS = tuple(f.name for f in fields(SpeculativeConfig))


def _is_between(value: object, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most  # type: ignore[operator]
