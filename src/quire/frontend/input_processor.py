"""Turns a prompt and SamplingParams into engine requests, which are checked and resolved here."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import msgspec

from quire.errors import ConfigError, ContextLengthError, InvalidRequestError
from quire.frontend.choices import check_choices
from quire.frontend.prompts import PromptType, check_cache_salt, is_unicode, read_prompt
from quire.frontend.tokenizer import Tokenizer
from quire.grammar.text import grammar_text
from quire.lora.request import Registration
from quire.messages import AddRequest, UseTokenizer
from quire.sampling_params import DEFAULT_MAX_LOGPROBS, SamplingParams

MAX_REQUEST_ID_CHARS = 256
MAX_PRIORITY = 2**63 - 1
# Fields of generation_config.json that become defaults of requests, with our names for them.
_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a request: context length in tokens, size of the vocabulary, most logprobs (-1: no limit)."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int = DEFAULT_MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A checked request. `requests` are its n continuations; the first of them computes the prompt for all.

    Their engine ids are never used twice. So late messages about a request that left cannot be mistaken for messages
    about the next request with the same `request_id`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # a copy: the caller may change theirs
    requests: list[AddRequest]
    tokenizer: UseTokenizer | None = None  # the tokenizer of the grammar: the engine must get it before the grammar
    adapter: Registration | None = None
    trace_headers: Mapping[str, str] | None = None  # the headers of the trace to which the request belongs

    def with_adapter(self, adapter: Registration) -> ProcessedRequest:
        """The same for an adapter."""
        requests = [msgspec.structs.replace(request, adapter=adapter.digest) for request in self.requests]
        return dataclasses.replace(self, requests=requests, adapter=adapter)

    def on_lane(self, lane: int) -> ProcessedRequest:
        """The same for a lane."""
        return dataclasses.replace(
            self, requests=[msgspec.structs.replace(request, lane=lane) for request in self.requests]
        )


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cut a prompt to its last or first `max_tokens` tokens. -1: cut it to the room that the answer leaves."""

    max_tokens: int
    side: Literal["left", "right"] = "left"  # the side that is cut off


class RequestOptions(TypedDict, total=False):
    """Options of a request besides prompt and SamplingParams: see InputProcessor.process."""

    priority: int
    cache_salt: str | None
    add_special_tokens: bool
    clamp_max_tokens: bool
    truncation: Truncation | None
    trace_headers: Mapping[str, str] | None


def sampling_defaults(
    generation_config: Mapping[str, Any], override: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Default SamplingParams fields from a model's generation_config.json, with `override` over it.

    Raises:
        ConfigError: a value that is illegal in a request.
    """
    merged = {**generation_config, **(override or {})}
    defaults = {ours: merged[theirs] for theirs, ours in _GENERATION_FIELDS.items() if merged.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ConfigError(
            f"The model's generation_config.json has an illegal default: {error.message}",
            fix="Use --override-generation-config to correct it, or --generation-config vllm to ignore the file",
            param="generation_config",
        ) from error
    return defaults


class InputProcessor:
    """Checks and resolves requests.

    Args:
        tokenizer: None if prompts and outputs are only token ids.
        limits: the model's and the server's.
        defaults: SamplingParams fields for requests without SamplingParams (`sampling_defaults`).
        eos_token_ids: tokens that end an output, besides the tokenizer's own EOS.
        seed: the seed from which seeds are drawn for requests without a seed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        *,
        defaults: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.defaults = dict(defaults or {})
        own = None if tokenizer is None else tokenizer.eos_token_id
        self.eos_token_ids = tuple(dict.fromkeys([*([] if own is None else [own]), *eos_token_ids]))
        self._seeds = random.Random(seed)
        self._numbers = itertools.count()
        self._tokenizer_message: UseTokenizer | None = None  # made once

    def with_max_model_len(self, max_model_len: int) -> InputProcessor:
        """A copy with the engine's final context length. Both share one sequence of seeds and engine ids."""
        other = copy.copy(self)
        other.limits = dataclasses.replace(self.limits, max_model_len=max_model_len)
        return other

    def default_params(self) -> SamplingParams:
        """The model's own defaults, for requests without SamplingParams."""
        return SamplingParams(**self.defaults)

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        add_special_tokens: bool = True,
        clamp_max_tokens: bool = False,
        truncation: Truncation | None = None,
        trace_headers: Mapping[str, str] | None = None,
        grammar: str | None = None,
    ) -> ProcessedRequest:
        """Check a prompt and its parameters, tokenize it, and make one AddRequest per continuation.

        Args:
            priority: lower runs first.
            cache_salt: only requests with the same salt share cached prefixes.
            arrival_time: on the monotonic clock; default: now.
            add_special_tokens: BOS and others; False for a rendered chat.
            clamp_max_tokens: lower a max_tokens that does not fit instead of refusing it (offline use).
            truncation: cut the prompt; None: refuse a long prompt.
            trace_headers: `traceparent` and `tracestate` of the trace that the request belongs to.
            grammar: made of structured_outputs by a GrammarPool; None: it is made here.

        Raises:
            InvalidRequestError: a field is illegal. ContextLengthError: prompt and output do not fit the context.
        """
        params = self.default_params() if params is None else params
        self._check_params(params)
        _check_request_id(request_id)
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            raise InvalidRequestError(
                "priority is not usable", expected="a 64-bit integer; lower runs first", param="priority"
            )
        text, ids, prompt_salt = self._read(prompt, add_special_tokens)
        if truncation is not None:
            whole, ids = ids, self._truncate(ids, truncation, params, clamp_max_tokens)
            if len(ids) < len(whole) and text is not None and self.tokenizer is not None:
                text = self.tokenizer.decode(ids, skip_special_tokens=False)  # what the model gets
        salt = check_cache_salt(cache_salt) if cache_salt is not None else prompt_salt
        max_tokens = self._resolve_max_tokens(len(ids), params, clamp_max_tokens)
        own = self._resolve_params(params, grammar)
        stop_token_ids = list(
            dict.fromkeys([*(() if params.ignore_eos else self.eos_token_ids), *(params.stop_token_ids or ())])
        )
        check_choices(own, stop_token_ids, max_tokens, self.limits.vocab_size)
        arrival = time.monotonic() if arrival_time is None else arrival_time
        engine_id = f"{request_id}-{next(self._numbers):x}"
        requests = [
            AddRequest(
                request_id=f"{engine_id}.{index}" if index else engine_id,
                prompt_token_ids=ids,
                sampling_params=own.continuation(index),
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                arrival_time=arrival,
                priority=priority,
                cache_salt=salt,
                fork_of=engine_id if index else None,
            )
            for index in range(own.n)
        ]
        tokenizer = self.use_tokenizer() if own.grammar is not None and grammar is None else None
        return ProcessedRequest(request_id, text, ids, own, requests, tokenizer, trace_headers=trace_headers)

    def _check_params(self, params: object) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params is a {type(params).__name__}", expected="SamplingParams", param="sampling_params"
            )
        params.verify(self.limits.vocab_size, self.limits.max_logprobs)
        # `verify` accepts these fields, because they are made here for the engine.
        for computed, source in (("bad_words_spelled", "bad_words"), ("grammar", "structured_outputs")):
            if getattr(params, computed) is not None:
                raise InvalidRequestError(
                    f"{computed} is computed from {source} and cannot be given", fix=f"Use {source}", param=computed
                )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. A text that cannot fit the context is refused before tokenization."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "This model runs without a tokenizer, so prompts must be token ids",
                fix="Send prompt_token_ids, or start without --skip-tokenizer-init",
                param="prompt",
            )
        self.tokenizer.check_length(text, self.limits.max_model_len)
        return self.tokenizer.encode(text, add_special_tokens)

    def _read(self, prompt: PromptType, add_special_tokens: bool) -> tuple[str | None, list[int], str | None]:
        text, ids, salt = read_prompt(prompt)
        if ids is None:
            assert text is not None
            ids = self.encode(text, add_special_tokens)
        if not ids:
            raise InvalidRequestError("The prompt has no tokens", expected="at least one token", param="prompt")
        self._check_ids(ids)
        return text, ids, salt

    def _truncate(self, ids: list[int], truncation: Truncation, params: SamplingParams, clamp: bool) -> list[int]:
        longest = truncation.max_tokens
        if type(longest) is not int or not (longest == -1 or longest >= 1):
            raise InvalidRequestError(
                "truncate_prompt_tokens is not usable",
                value=longest,
                expected="a number of tokens from 1 on, or -1 for the largest number that fits",
                param="truncate_prompt_tokens",
            )
        if longest == -1:
            reserved = 1 if params.max_tokens is None or clamp else params.max_tokens
            longest = max(self.limits.max_model_len - reserved, 1)
        if len(ids) <= longest:
            return ids
        return ids[-longest:] if truncation.side == "left" else ids[:longest]

    def _check_ids(self, ids: list[int]) -> None:
        high = self.limits.vocab_size - 1
        if min(ids) < 0 or max(ids) > high:
            wrong = next(token_id for token_id in ids if not 0 <= token_id <= high)
            shown = wrong if wrong.bit_length() <= 64 else "an integer of more than 64 bits"
            raise InvalidRequestError(
                "The prompt contains a token id outside the vocabulary",
                value=shown,
                expected=f"integers in [0, {high}]",
                param="prompt",
            )

    def _resolve_max_tokens(self, num_prompt_tokens: int, params: SamplingParams, clamp: bool) -> int:
        longest = self.limits.max_model_len
        room = longest - num_prompt_tokens
        if room < 1:
            raise ContextLengthError(
                f"This model's maximum context length is {longest} tokens, but the prompt has {num_prompt_tokens}",
                expected=f"at most {longest - 1} prompt tokens, so that one can be generated",
                fix="Shorten the prompt",
                param="prompt",
            )
        if params.max_tokens is not None and params.max_tokens > room and not clamp:
            raise ContextLengthError(
                f"This model's maximum context length is {longest} tokens, but the prompt has {num_prompt_tokens} "
                f"tokens and max_tokens asks for {params.max_tokens} more",
                fix=f"Lower max_tokens to {room}, leave it out, or shorten the prompt",
                param="max_tokens",
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise ContextLengthError(
                f"min_tokens asks for {params.min_tokens} tokens, but only {max_tokens} fit after a prompt of "
                f"{num_prompt_tokens} tokens (maximum context length {longest})",
                fix=f"Lower min_tokens to {max_tokens}, or shorten the prompt",
                param="min_tokens",
            )
        return max_tokens

    def _resolve_params(self, params: SamplingParams, grammar: str | None) -> SamplingParams:
        """A shallow copy with a seed, and with bad words as token ids."""
        own = copy.copy(params)
        if own.seed is None:
            own.seed = self._seeds.getrandbits(63)
        if own.bad_words:
            self._forbid(own, own.bad_words)
        if own.structured_outputs is not None:
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "structured_outputs needs a tokenizer, and this model runs without one", param="structured_outputs"
                )
            own.grammar = grammar or grammar_text(own.structured_outputs, self.special_ids)
            own.structured_outputs = None
        if own.stop and self.tokenizer is None:
            raise InvalidRequestError(
                "stop needs a tokenizer, and this model runs without one", fix="Use stop_token_ids", param="stop"
            )
        return own

    @property
    def special_ids(self) -> dict[str, int]:
        """Of special tokens, by their text."""
        return {} if self.tokenizer is None else self.tokenizer.special_ids

    def use_tokenizer(self) -> UseTokenizer:
        """The message that tells a process of the tokenizer, which is not None."""
        if self._tokenizer_message is None:
            assert self.tokenizer is not None
            self._tokenizer_message = UseTokenizer(self.tokenizer.backend.to_str(), list(self.eos_token_ids))
        return self._tokenizer_message

    def _forbid(self, own: SamplingParams, words: Sequence[str]) -> None:
        """Forbid words in all spellings, or only in the tokenizer's if a token's text depends on its neighbours."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "bad_words needs a tokenizer, and this model runs without one", fix="Use logit_bias", param="bad_words"
            )
        if not all(word.strip() for word in words):
            raise InvalidRequestError("A bad word has only spaces", fix="Remove it", param="bad_words")
        if self.tokenizer.words is not None:
            own.bad_words_spelled = self.tokenizer.words.spell(words)
            return
        spelled = [self.tokenizer.encode(before + word.strip(), False) for word in words for before in ("", " ")]
        known = range(self.limits.vocab_size)
        own.bad_words_token_ids = [ids for ids in spelled if ids and all(token_id in known for token_id in ids)]


def _check_request_id(request_id: Any) -> None:
    if (
        not isinstance(request_id, str)
        or not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS
        or not is_unicode(request_id)
    ):
        raise InvalidRequestError(
            "request_id is not usable",
            expected=f"a string of 1 to {MAX_REQUEST_ID_CHARS} characters",
            param="request_id",
        )
