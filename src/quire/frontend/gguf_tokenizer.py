"""The tokenizer in a GGUF file's metadata, as an object of the tokenizers library, equal to the tokenizer.json.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Pre-tokenizers have names there (`tokenizer.ggml.pre`).
The meaning of a name is the tokenizer.json of the models that llama.cpp's converter gives the name to.
"""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quire import logs
from quire.errors import ConfigError
from quire.gguf.file import open_gguf

logger = logs.get_logger(__name__)

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"  # sentencepiece's
# Limits for sentencepiece tokens, because all their splits are looked up. Published vocabularies stay well under them.
_MAX_PIECE_CHARS = 1024
_MAX_SPLIT_CHARS = 1 << 27  # the most characters of the halves of all splits together
_MAX_MERGES = 1 << 21
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# llama.cpp strips the spaces after control tokens of this architecture, except for these tokens, like tokenizer.json.
_STRIPPING_ARCHITECTURE, _NOT_STRIPPING = "phi3", frozenset({"<unk>", "<s>", "<|endoftext|>"})

_LETTERS_UPPER, _LETTERS_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"


def _o200k(digits: str, contraction: str) -> str:
    word = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{word}{_LETTERS_UPPER}*{_LETTERS_LOWER}+{contraction}|{word}{_LETTERS_UPPER}+{_LETTERS_LOWER}*{contraction}|"
        rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """Cuts text before merges, by one pattern after the other."""

    patterns: tuple[str, ...]
    takes_whole_words: bool = False  # a word that is a token is not merged from its bytes
    adds_bos: bool = False  # the default, if the file does not say it
    is_composed: bool = False  # text is brought to Unicode's NFC first


_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), takes_whole_words=True, adds_bos=True)
_CL100K = PreTokenizer((_cl100k(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),), is_composed=True)
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN = PreTokenizer((_GPT2,))
_LINE, _HAN_AND_HANGUL = r"[\r\n]", "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_CODER = PreTokenizer((_LINE, r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}"))
_DEEPSEEK_LLM = PreTokenizer(
    (_LINE, r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"(?<!\s)\s++$", _HAN_AND_HANGUL, r"\p{N}")
)
# llama.cpp's pre-tokenizer for files without a name.
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "llama-v3.1"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "granite-docling"), _PLAIN),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "gpt-4o": PreTokenizer((_o200k(r"\p{N}{1,3}", rf"{_CONTRACTION}?"),)),
    "tekken": PreTokenizer((_o200k(r"\p{N}", ""),), takes_whole_words=True, adds_bos=True),
}


@dataclass(frozen=True)
class GgufTokenizer:
    """The parts of a Tokenizer."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token, ... -> token
    add_bos: bool
    chat_templates: dict[str, str] = field(default_factory=dict)


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """The tokenizer of a file. Raises ConfigError if it has no usable one, and WeightsError for a broken file."""
    metadata = open_gguf(path).metadata
    vocabulary = _Vocabulary(metadata, path.name)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(vocabulary)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise _unusable(path.name, f"its tokenizer is of the kind {kind!r}, not gpt2 or llama")
    _add_special_tokens(backend, vocabulary, metadata.get("general.architecture") == _STRIPPING_ARCHITECTURE)
    if metadata.get("tokenizer.ggml.add_eos_token") is True:
        logger.warning("%s asks for its end token after every prompt: Quire does not add it", path.name)
    return GgufTokenizer(
        backend,
        vocabulary.special_tokens(),
        metadata.get("tokenizer.ggml.add_bos_token", adds_bos) is True,
        _chat_templates(metadata),
    )


class _Vocabulary:
    """Tokens by id, with their types and scores, which are checked."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self.metadata, self.name = metadata, name
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not _are_texts(tokens):
            raise _unusable(name, "it has no list of tokens")
        self.tokens: list[str] = tokens
        self.kinds = self._numbers("token_type", _NORMAL)
        self.scores = self._numbers("scores", 0.0)
        self.ids = {token: index for index, token in enumerate(self.tokens)}

    def _numbers(self, key: str, default: float) -> Sequence[float]:
        """One number for each token."""
        numbers = self.metadata.get(f"tokenizer.ggml.{key}")
        if numbers is None:
            return [default] * len(self.tokens)
        if not isinstance(numbers, array.array) or len(numbers) != len(self.tokens):
            raise _unusable(self.name, f"its {key} does not have a number for each of {len(self.tokens)} tokens")
        return numbers

    def merges(self) -> list[tuple[str, str]]:
        merges = self.metadata.get("tokenizer.ggml.merges")
        if not _are_texts(merges):
            raise _unusable(self.name, "it has no list of merges")
        pairs = []
        for merge in merges:
            cut = merge.find(" ", 1)
            left, right = merge[:cut], merge[cut + 1 :]
            if cut < 0 or left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise _unusable(self.name, f"its merge {merge!r:.100} is not of tokens into a token")
            pairs.append((left, right))
        return pairs

    def special_tokens(self) -> dict[str, str]:
        found = {}
        for name, key in _SPECIAL_TOKENS.items():
            token_id = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(token_id, int) and 0 <= token_id < len(self.tokens):
                found[name] = self.tokens[token_id]
        return found


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _unusable(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"The tokenizer in {name} cannot be used: {why}",
        fix="Name the folder or hub id of the original model with --tokenizer",
        param="tokenizer",
    )


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE as in GPT-2, and whether prompts begin with BOS by default."""
    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise _unusable(vocabulary.name, f"its pre-tokenizer is {name!r}, none of {known}")
    try:
        model = models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=pre.takes_whole_words)
    except Exception as error:  # the library raises bare Exception
        raise _unusable(vocabulary.name, str(error)) from error
    backend = tokenizers.Tokenizer(model)
    if pre.is_composed:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE: pieces are merged by their scores, and characters without a piece are spelled in bytes."""
    unknown = vocabulary.special_tokens().get("unk_token")
    if unknown is None and _UNKNOWN in vocabulary.kinds:
        unknown = vocabulary.tokens[list(vocabulary.kinds).index(_UNKNOWN)]
    try:
        model = models.BPE(
            vocab=vocabulary.ids, merges=_merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    except Exception as error:  # the library raises bare Exception
        raise _unusable(vocabulary.name, str(error)) from error
    backend = tokenizers.Tokenizer(model)
    has_prefix = vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if has_prefix else []))
    return backend


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first.

    Equal scores are ordered as in transformers' conversion of sentencepiece models, which made most tokenizer.json.
    """
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind == _NORMAL
    }
    if (split_chars := sum(len(token) * (len(token) - 1) for token in ids)) > _MAX_SPLIT_CHARS:
        raise _unusable(vocabulary.name, f"its tokens are too many and too long: {split_chars} characters of halves")
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, index in ids.items():
        if len(token) > _MAX_PIECE_CHARS:
            raise _unusable(vocabulary.name, f"token {index} has {len(token)} characters, over {_MAX_PIECE_CHARS}")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-vocabulary.scores[index], -len(left), -len(right), index, left, right))
        if len(found) > _MAX_MERGES:
            raise _unusable(vocabulary.name, f"its tokens are made of each other in over {_MAX_MERGES} ways")
    found.sort(key=lambda merge: merge[:3])  # stable: by id, then by cut
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, strips: bool) -> None:
    """Add tokens that are matched in plain text: control tokens, which output skips, and user-defined ones."""
    added = []
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token:
            is_special = kind != _USER_DEFINED
            rstrip = strips and is_special and token not in _NOT_STRIPPING
            added.append(AddedToken(token, special=is_special, normalized=False, rstrip=rstrip))
    backend.add_tokens(added)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name -> Jinja source."""
    templates = {"default": metadata.get("tokenizer.chat_template")}
    prefix = "tokenizer.chat_template."
    templates |= {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return {name: source for name, source in templates.items() if isinstance(source, str)}
