"""SamplingParams and its validation. Only this file knows the legal ranges of a request's sampling fields.

Names, defaults and meanings follow vLLM 0.32. Every way in (Python API, each HTTP API, batch files) builds a
SamplingParams, which checks itself, and then calls `verify(vocab_size, max_logprobs)` with the server's limits.
"""

from __future__ import annotations

import copy
import difflib
import enum
import sys
from typing import Any, Final

import msgspec

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.field_checks import (
    ABOVE_ZERO,
    check_count,
    check_float,
    check_int,
    check_strings,
    check_token_ids,
    check_type,
    plain_float,
    plain_int,
    plain_list,
)
from quire.logs import get_logger

logger = get_logger(__name__)

GREEDY_TEMPERATURE: Final = 1e-5  # below it sampling is greedy
MIN_TEMPERATURE: Final = 1e-2  # smaller positive temperatures become this value, as in vLLM
MAX_TEMPERATURE: Final = 2.0  # vLLM's and OpenAI's limit
# A positive logit is divided by it, a negative one multiplied: the bounds keep both finite. Usual values: 1.0 to 1.5.
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
MAX_LENGTH_PENALTY: Final = 10.0  # the largest length penalty of beam search
MAX_N: Final = 128
MAX_TOKENS: Final = 2**31 - 1  # any count of tokens
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_BYTES: Final = 256
MAX_STOP_TOKEN_IDS: Final = 128
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_BYTES: Final = 256
MAX_LOGIT_BIAS: Final = 1024
MAX_LOGPROB_TOKEN_IDS: Final = 128
MAX_THINKING_TOKEN_IDS: Final = 8
MAX_GRAMMAR_BYTES: Final = 1 << 20  # the most bytes of a constraint in a request
MAX_CHOICES: Final = 10_000
MAX_VOCAB_SIZE: Final = 2**20  # bounds the number of token ids while the vocabulary is not known
DEFAULT_MAX_LOGPROBS: Final = 20

INT_RANGES: Final[dict[str, tuple[int, int]]] = {
    "n": (1, MAX_N),
    "top_k": (-1, MAX_TOKENS),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "stream_interval": (1, MAX_TOKENS),
    "thinking_token_budget": (-1, MAX_TOKENS),
}
FLOAT_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (ABOVE_ZERO, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}
_BOOLS: Final = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_clone",
)
TOKEN_ID_LIMITS: Final[dict[str, int]] = {
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": MAX_VOCAB_SIZE,
    "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
}
STRING_LIMITS: Final[dict[str, tuple[int, int]]] = {
    "stop": (MAX_STOP_STRINGS, MAX_STOP_STRING_BYTES),
    "bad_words": (MAX_BAD_WORDS, MAX_BAD_WORD_BYTES),
}
_NULLABLE: Final = frozenset(
    ("seed", "max_tokens", "logprobs", "prompt_logprobs", "stream_interval", "thinking_token_budget")
)
# vLLM's fields that are not implemented here. Only these values are accepted; others are refused, never ignored.
_UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "watermarking": (None,),
    "extra_args": (None, {}),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None, 0),
    "flat_logprobs": (False,),
}
_GUIDED: Final = "It was replaced: use structured_outputs=StructuredOutputsParams(json=...), or regex, choice, grammar"
REMOVED_FIELDS: Final[dict[str, str]] = {
    "best_of": "Use n and choose among the outputs by cumulative_logprob",
    "use_beam_search": "Use LLM.beam_search with BeamSearchParams",
    "early_stopping": "Use LLM.beam_search with BeamSearchParams",
    "length_penalty": "Use LLM.beam_search with BeamSearchParams(length_penalty=...)",
    "logits_processors": "Use logit_bias, allowed_token_ids or bad_words",
    "truncate_prompt_tokens": "Shorten the prompt before sending it",
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
}


class RequestOutputKind(enum.Enum):
    """The content of each RequestOutput of a stream: all tokens so far, only new ones, or all of them at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(enum.IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class _KnownFieldsOnly(msgspec.StructMeta):
    """Refuses removed and unknown fields, with their name and the replacement. A plain Struct does not do that.

    `guided_decoding`, a name of older vLLMs, is taken as `structured_outputs`.
    """

    def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805
        if (
            "structured_outputs" in cls.__struct_fields__
            and (guided := fields.pop("guided_decoding", None)) is not None
        ):
            if fields.get("structured_outputs") is not None:
                raise InvalidRequestError(
                    "guided_decoding and structured_outputs are one setting, and both are given",
                    fix="Leave guided_decoding out",
                    param="guided_decoding",
                )
            fields["structured_outputs"] = guided
        for name in fields.keys() - set(cls.__struct_fields__):
            refuse_field(name, cls.__struct_fields__)
        return super().__call__(*args, **fields)


class StructuredOutputsParams(
    msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True, metaclass=_KnownFieldsOnly
):
    """A constraint on the output text: exactly one of the first six.

    `reasoning_end`: any text that ends with one of these strings comes first, and the constraint begins behind it.
    `reasoning_start`: this text comes only if the output begins with one of these strings.
    `answer_start`: one of these strings comes before the constraint, and reasoning may come several times before it.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    reasoning_start: list[str] | None = None
    reasoning_end: list[str] | None = None
    answer_start: list[str] | None = None

    def __post_init__(self) -> None:
        self.verify()

    @property
    def kind(self) -> str:
        """The name of the constraint that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        # json may be False, a schema that nothing satisfies. json_object: False asks for nothing.
        return [
            name
            for name in CONSTRAINTS
            if getattr(self, name) is not None and (name, self.json_object) != ("json_object", False)
        ]

    def verify(self) -> None:
        """Check every field. Raises InvalidRequestError."""
        given = self._given()
        if len(given) != 1:
            raise InvalidRequestError(
                "structured_outputs needs exactly one constraint",
                value=", ".join(given) or "none",
                expected=f"one of {', '.join(CONSTRAINTS)}",
                param="structured_outputs",
            )
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            if (text := getattr(self, name)) is not None:
                check_type(f"structured_outputs.{name}", text, str, "a string")
                check_strings(f"structured_outputs.{name}", [text], 1, MAX_GRAMMAR_BYTES)
        for name in ("reasoning_start", "reasoning_end", "answer_start"):
            if (tags := getattr(self, name)) is not None:
                check_strings(f"structured_outputs.{name}", tags, MAX_STOP_STRINGS, MAX_STOP_STRING_BYTES)
            if tags and not self.reasoning_end:
                raise InvalidRequestError(
                    f"structured_outputs.{name} needs reasoning_end",
                    fix="Say where the reasoning ends",
                    param="structured_outputs",
                )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_type(f"structured_outputs.{name}", getattr(self, name), bool, "true or false")
        if self.json is not None:
            check_type("structured_outputs.json", self.json, (str, dict, bool), "a JSON Schema")
        if self.choice is not None:
            check_strings("structured_outputs.choice", self.choice, MAX_CHOICES, MAX_GRAMMAR_BYTES)
            if not self.choice:
                raise InvalidRequestError("structured_outputs.choice is empty", param="structured_outputs")


class GuidedDecodingParams(StructuredOutputsParams):
    """StructuredOutputsParams under the name of older vLLMs. There is one grammar engine, so these change nothing."""

    backend: str | None = None
    backend_was_auto: bool = False
    disable_fallback: bool = False

    def __post_init__(self) -> None:
        self.verify()
        if self.backend not in (None, "auto"):
            logger.warning("GuidedDecodingParams: backend has no effect: one grammar engine reads every constraint")


CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class SpelledWord(msgspec.Struct, frozen=True, array_like=True):
    """A word by its tokens. Values are the numbers of its bytes that are out after the token; all bytes = forbidden.

    Args:
        anywhere: tokens that begin the word at any place, because they contain the boundary before it.
        steps: one dict for each number of bytes that are out. The first has tokens that begin the word at a boundary.
    """

    anywhere: dict[int, list[int]]
    steps: list[dict[int, list[int]]]


class SpelledWords(msgspec.Struct, frozen=True, array_like=True):
    """Words that an output must not have. `inside_word`: a bit for each token id; 1: no word boundary follows it."""

    words: list[SpelledWord]
    inside_word: bytes

    def __repr__(self) -> str:
        return f"<{len(self.words)} words>"


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True, metaclass=_KnownFieldsOnly):
    """The sampling of one request. The constructor normalises and checks; errors are InvalidRequestErrors."""

    n: int = 1  # continuations of the prompt
    presence_penalty: float = 0.0  # subtracted once from the logit of every token in the output
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the output
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens in prompt or output
    temperature: float = 1.0  # 0 is greedy; ]0, 0.01[ becomes 0.01
    watermarking: Any = None
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: no limit
    min_p: float = 0.0  # tokens below min_p times the probability of the most likely token are left out
    seed: int | None = None  # None or -1: the front end draws one
    stop: str | list[str] | None = None  # always a list after construction
    stop_token_ids: list[int] | None = None  # always a list after construction
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0  # EOS and stop_token_ids are forbidden before this length
    # The number of most likely tokens to report per output token, besides the sampled one; -1: all. True is 1.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None  # report exactly these tokens besides the sampled token
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # tokens per streamed output
    skip_clone: bool = False  # clone() may return this object itself
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None  # token id (JSON: its decimal string) -> added to its logit
    allowed_token_ids: list[int] | None = None  # no other token is sampled
    extra_args: dict[str, Any] | None = None
    # Words that the text will not have in this exact case, for every tokenization. A word begins at a boundary. A token
    # that completes it is forbidden, also if a longer word could follow. (vLLM forbids one or two tokenizations, also
    # inside other words.) Always a list after construction.
    bad_words: list[str] | None = None
    # A bool after construction: prompt logprobs need the whole prompt computed.
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None  # tokens of reasoning, after which its end is forced; None or -1: any
    # The token that ends the reasoning, and the tokens that begin it unless the output begins inside it: see
    # sampling.thinking.
    thinking_token_ids: list[int] | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    # The last id of a sequence is forbidden if the output so far ends with the ids before it.
    bad_words_token_ids: list[list[int]] | None = None
    bad_words_spelled: SpelledWords | None = None  # set by the front end, which has the tokenizer
    grammar: str | None = None  # set by the front end: the text of structured_outputs, see grammar.text

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """For JSON bodies: null means the default, so a None is dropped unless the field has None as a value."""
        return cls(**{name: value for name, value in fields.items() if value is not None or name in _NULLABLE})

    def __post_init__(self) -> None:
        self._normalise_types()
        self.verify(max_logprobs=-1)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.sampling_type is SamplingType.GREEDY:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        self.top_k = max(self.top_k, 0)
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    @property
    def sampling_type(self) -> SamplingType:
        if self.temperature < GREEDY_TEMPERATURE:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def num_logprobs(self) -> int | None:
        """The number of logprobs to report per output token besides the sampled one. None: no logprobs; -1: all."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    def clone(self) -> SamplingParams:
        """A deep copy, or this object itself if `skip_clone`."""
        return self if self.skip_clone else copy.deepcopy(self)

    def continuation(self, index: int) -> SamplingParams:
        """Parameters of the `index`-th of n continuations: n is 1, and a given seed becomes an own one.

        Only the first reports prompt logprobs, because they are the same for all, and the others share its prompt's KV.
        """
        own = copy.copy(self)  # the lists are shared, because they are never changed
        own.n = 1
        if index > 0:
            own.prompt_logprobs = None
            if self.seed is not None:
                own.seed = (self.seed + index) % 2**63  # never -1, which means no seed
        return own

    def _normalise_types(self) -> None:
        """Turn equivalent values into plain Python types. Wrong values stay, and `verify` refuses them."""
        for name in INT_RANGES:
            setattr(self, name, plain_int(getattr(self, name)))
        for name in FLOAT_RANGES:
            setattr(self, name, plain_float(getattr(self, name)))
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            setattr(self, name, (1 if count else None) if isinstance(count, bool) else plain_int(count))
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                setattr(self, name, [])
        for name, (max_count, _) in STRING_LIMITS.items():
            setattr(self, name, plain_list(getattr(self, name), max_count))
        for name, max_count in TOKEN_ID_LIMITS.items():
            setattr(self, name, plain_list(getattr(self, name), max_count))
        if isinstance(self.logit_bias, dict) and len(self.logit_bias) <= MAX_LOGIT_BIAS:
            bias = {_token_id_key(key): plain_float(value) for key, value in self.logit_bias.items()}
            if len(bias) < len(self.logit_bias):
                raise InvalidRequestError(
                    "logit_bias names a token twice, as a number and as a string", param="logit_bias"
                )
            self.logit_bias = bias

    def verify(self, vocab_size: int | None = None, max_logprobs: int = DEFAULT_MAX_LOGPROBS) -> None:
        """Check every field. The constructor calls it without the server's limits, and every way in calls it with them.

        Args:
            vocab_size: token ids must be below it; None checks the sign only.
            max_logprobs: limit of logprobs and prompt_logprobs; -1 is no limit.
        Raises:
            InvalidRequestError: it has the field in `param`. UnsupportedFieldError: the field is not implemented.
        """
        for name, neutral in _UNSUPPORTED.items():
            value = getattr(self, name)
            if not any(type(value) is type(item) and value == item for item in neutral):
                raise UnsupportedFieldError(f"{name} is not supported yet", fix=f"Remove {name}", param=name)
        self._verify_types_and_ranges(vocab_size)
        if self.thinking_token_budget not in (None, -1) and not self.thinking_token_ids:
            raise InvalidRequestError(
                "thinking_token_budget needs the token that ends the reasoning",
                fix="Use POST /v1/chat/completions of a server with a reasoning parser, or set thinking_token_ids",
                param="thinking_token_budget",
            )
        self._verify_constraints()
        self._verify_logit_bias(vocab_size)
        self._verify_bad_words_token_ids(vocab_size)
        self._verify_logprobs(vocab_size, max_logprobs)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "min_tokens is greater than max_tokens",
                value=self.min_tokens,
                expected=f"at most {self.max_tokens}",
                fix="Lower min_tokens or raise max_tokens",
                param="min_tokens",
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop needs text, but detokenize is false", fix="Use stop_token_ids or detokenize", param="stop"
            )

    def _verify_types_and_ranges(self, vocab_size: int | None) -> None:
        """Check each field by itself."""
        for name, (low, high) in INT_RANGES.items():
            if (value := getattr(self, name)) is not None or name not in _NULLABLE:
                check_int(name, value, low, high)
        for name, (lowest, highest) in FLOAT_RANGES.items():
            check_float(name, getattr(self, name), lowest, highest)
        for name in _BOOLS:
            check_type(name, getattr(self, name), bool, "true or false")
        if self.skip_reading_prefix_cache is not None:
            check_type("skip_reading_prefix_cache", self.skip_reading_prefix_cache, bool, "true or false")
        check_type("output_kind", self.output_kind, RequestOutputKind, "a RequestOutputKind")
        for name, (max_count, max_bytes) in STRING_LIMITS.items():
            check_strings(name, getattr(self, name), max_count, max_bytes)
        for name, limit in TOKEN_ID_LIMITS.items():
            if (ids := getattr(self, name)) is not None:
                check_token_ids(name, ids, limit, vocab_size)
        if self.thinking_token_ids is not None:
            check_token_ids("thinking_token_ids", self.thinking_token_ids, MAX_THINKING_TOKEN_IDS, vocab_size)

    def _verify_constraints(self) -> None:
        if self.structured_outputs is not None:
            check_type(
                "structured_outputs", self.structured_outputs, StructuredOutputsParams, "StructuredOutputsParams"
            )
            self.structured_outputs.verify()
        if self.grammar is not None:
            check_type("grammar", self.grammar, str, "null: it is made of structured_outputs")
            check_strings("grammar", [self.grammar], 1, sys.maxsize)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty: no token could be sampled",
                fix="Name at least one token",
                param="allowed_token_ids",
            )

    def _verify_logit_bias(self, vocab_size: int | None) -> None:
        if self.logit_bias is None:
            return
        check_type("logit_bias", self.logit_bias, dict, "a map from token id to a number")
        check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        if vocab_size is not None:  # so that one error names every bad key
            check_token_ids("logit_bias", list(self.logit_bias), MAX_LOGIT_BIAS, vocab_size)
        for bias in self.logit_bias.values():
            check_float("logit_bias", bias, -100.0, 100.0)

    def _verify_bad_words_token_ids(self, vocab_size: int | None) -> None:
        if self.bad_words_spelled is not None:
            check_type("bad_words_spelled", self.bad_words_spelled, SpelledWords, "null: it is made of bad_words")
        name = "bad_words_token_ids"
        if self.bad_words_token_ids is None:
            return
        check_type(name, self.bad_words_token_ids, list, "a list of lists of token ids")
        # Each word with and without a leading space.
        check_count(name, len(self.bad_words_token_ids), 2 * MAX_BAD_WORDS)
        for token_ids in self.bad_words_token_ids:
            check_token_ids(name, token_ids, 2 * MAX_BAD_WORD_BYTES, vocab_size)
            if not token_ids:
                raise InvalidRequestError("A bad word has no tokens", fix="Remove it", param=name)

    def _verify_logprobs(self, vocab_size: int | None, max_logprobs: int) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            check_num_logprobs(name, getattr(self, name), vocab_size, max_logprobs)
        ids = self.logprob_token_ids
        if ids is not None and self.logprobs not in (None, len(ids)):
            raise InvalidRequestError(
                "logprobs and logprob_token_ids disagree",
                value=self.logprobs,
                expected=f"logprobs unset or {len(ids)}, the number of logprob_token_ids",
                param="logprob_token_ids",
            )


class BeamSearchParams(msgspec.Struct, omit_defaults=True, kw_only=True, metaclass=_KnownFieldsOnly):
    """Beam search: keep `beam_width` sequences, ranked by cumulative logprob / length ** length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.beam_width, self.max_tokens = plain_int(self.beam_width), plain_int(self.max_tokens)
        self.temperature, self.length_penalty = plain_float(self.temperature), plain_float(self.length_penalty)
        self.verify()

    def verify(self) -> None:
        """Check every field. Raises InvalidRequestError with the field in `param`."""
        check_int("beam_width", self.beam_width, 1, MAX_N)
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_float("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_type(name, getattr(self, name), bool, "true or false")
        if self.structured_outputs is not None:
            raise UnsupportedFieldError(
                "beam search has no structured_outputs", fix="Use SamplingParams", param="structured_outputs"
            )


def check_num_logprobs(name: str, count: int | None, vocab_size: int | None, max_logprobs: int) -> None:
    """Refuse a number of logprobs (-1: all) above `max_logprobs` (-1: no limit); `name` is the error's param."""
    if count is None:
        return
    check_int(name, count, -1, MAX_VOCAB_SIZE)
    wanted = count if count >= 0 else vocab_size or MAX_VOCAB_SIZE
    if max_logprobs != -1 and wanted > max_logprobs:
        raise InvalidRequestError(
            f"{name} is above this server's limit",
            value=count,
            expected=f"0 to {max_logprobs}",
            fix="Ask for fewer, or start the server with a higher --max-logprobs (-1: no limit)",
            param=name,
        )


def refuse_field(name: str, known: tuple[str, ...] | None = None) -> None:
    """Raise UnsupportedFieldError, with the replacement, for a field that was removed or never existed."""
    shown = name[:64]
    if name in REMOVED_FIELDS:
        raise UnsupportedFieldError(
            f"{shown} is not a sampling parameter any more", fix=REMOVED_FIELDS[name], param=shown
        )
    close = difflib.get_close_matches(shown, known or SamplingParams.__struct_fields__, n=1)
    fix = f"The nearest name is {close[0]}" if close else "Remove it"
    raise UnsupportedFieldError(f"Unknown sampling parameter {shown!r}", fix=fix, param=shown)


def _token_id_key(key: Any) -> Any:
    """A JSON object's key as a token id, if it is one."""
    if isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdigit() and str(int(key)) == key:
        return int(key)
    return plain_int(key)
