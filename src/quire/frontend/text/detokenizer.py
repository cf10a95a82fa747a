"""Incremental text from token ids: a byte string per token and a UTF-8 decoder, or a window for unusual decoders.

Most decoders of `tokenizer.json` (byte-level BPE; sentencepiece with `▁` and byte fallback) join one byte string per
token. So streaming needs no decoder calls: bytes are looked up and joined, and at most three bytes of an incomplete
character are held back. Invalid bytes become U+FFFD by the Unicode rule "maximal subpart", as in CPython and in Rust's
from_utf8_lossy. (The tokenizers library turns a whole run of byte-fallback tokens into U+FFFD if one of its bytes is
wrong. A stream cannot do that.)
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REPLACEMENT = "\ufffd"
MAX_WINDOW = 32  # WindowDetokenizer drops old tokens after this number, or after twice this number in invalid text
CONTEXT = 8  # tokens that it keeps then or takes from the prompt: no known decoder looks further back


@dataclass(frozen=True, slots=True)
class DecoderRule:
    """A decoder that joins one byte string per token.

    `first`, if set, replaces `encode` for the first token of a text. `strip_left` spaces are removed at its start.
    """

    encode: Callable[[str], bytes]
    first: Callable[[str], bytes] | None = None
    strip_left: int = 0


def compile_decoder(decoder: Mapping[str, Any] | None) -> DecoderRule | None:
    """The rule of a `decoder` entry of tokenizer.json; None if it is not of this simple kind."""
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds and kinds[0] == "ByteLevel" and set(kinds[1:]) <= {"Fuse"}:
        return DecoderRule(_byte_level_bytes)
    replaces: list[tuple[str, str]] = []
    first_replaces: list[tuple[str, str]] | None = None
    strip_left, byte_fallback, fused = 0, False, False
    for position, step in enumerate(steps):
        match step:
            case {"type": "Metaspace", "replacement": str(mark)} if position == 0:
                replaces.append((mark, " "))
                if step.get("prepend_scheme", "always") != "never":
                    first_replaces = [(mark, "")]
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                not byte_fallback and not fused
            ):
                replaces.append((old, new))
                if first_replaces is not None:
                    first_replaces.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if (
                fused and position == len(steps) - 1
            ):
                strip_left = start
            case _:
                return None
    if not steps:
        return None
    return DecoderRule(
        _replacing(replaces, byte_fallback),
        _replacing(first_replaces, byte_fallback) if first_replaces is not None else None,
        strip_left,
    )


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _byte_alphabet() -> dict[int, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable Latin-1 is itself, the other bytes count from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = {chr(char): byte for char, byte in _byte_alphabet().items()}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token with characters outside of the alphabet is plain text
        return token.encode()


def _replacing(replaces: Sequence[tuple[str, str]], byte_fallback: bool) -> Callable[[str], bytes]:
    def encode(token: str) -> bytes:
        for old, new in replaces:
            token = token.replace(old, new)
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.encode()

    return encode


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes, filled at the first use of an id. Ids in `skipped` and unknown ids are empty."""

    def __init__(
        self,
        token_of_id: Callable[[int], str | None],
        encode: Callable[[str], bytes],
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._token_of_id, self._encode, self._skipped = token_of_id, encode, skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._token_of_id(token_id)
        self[token_id] = data = b"" if token is None else self._encode(token)
        return data


class ByteDetokenizer:
    """Joins the tokens' bytes and decodes them. It holds back an incomplete character (at most 3 bytes).

    Args:
        table: bytes of every token.
        first: bytes of every token at the start of a text; None if this makes no difference or text came before.
        strip_left: number of spaces to remove at the start of the text.
        pending: bytes of an incomplete character at the end of the text before.
    """

    __slots__ = ("_first", "_pending", "_strip_left", "_table")

    def __init__(
        self, table: TokenBytes, first: TokenBytes | None = None, strip_left: int = 0, pending: bytes = b""
    ) -> None:
        self._table, self._first, self._strip_left, self._pending = table, first, strip_left, pending

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        table = self._table
        if self._first is not None:
            data = self._push_first(token_ids)
        elif len(token_ids) == 1:
            data = table[token_ids[0]]
        else:
            data = b"".join([table[token_id] for token_id in token_ids])
        if self._pending:
            data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._strip(text) if self._strip_left else text

    def _push_first(self, token_ids: Sequence[int]) -> bytes:
        """Join the bytes like `push`, before the first token with text has come."""
        assert self._first is not None
        for position, token_id in enumerate(token_ids):
            if self._table[token_id]:
                data = self._first[token_id]
                self._first = None
                return data + b"".join([self._table[later] for later in token_ids[position + 1 :]])
        return b""

    def _strip(self, text: str) -> str:
        kept = text
        while self._strip_left and kept.startswith(" "):
            kept = kept[1:]
            self._strip_left -= 1
        if kept:
            self._strip_left = 0
        return kept

    def flush(self) -> str:
        """U+FFFD for an incomplete character at the end of the output, else an empty text."""
        text = codecs.utf_8_decode(self._pending, "replace", True)[0]
        self._pending = b""
        return text


class WindowDetokenizer:
    """For any decoder: decodes a window of the last tokens and lets out text that the next token cannot change.

    Args:
        decode: the tokenizer's function from token ids to text.
        prompt_token_ids: their end is the context of the first output token. Its text is not let out.
    """

    __slots__ = ("_decode", "_num_out", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = self._end_of(list(prompt_token_ids))
        self._num_out = len(decode(self._window))  # characters of the window's text that were handed on

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        pieces = [self._push_one(token_id) for token_id in token_ids]
        return "".join(pieces)

    def _push_one(self, token_id: int) -> str:
        before = self._decode(self._window)
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = len(_common_prefix(before, text).rstrip(REPLACEMENT))
        piece = text[self._num_out : stable]
        self._num_out = max(self._num_out, stable)
        if len(self._window) > MAX_WINDOW:
            self._shorten(text)
        return piece

    def _shorten(self, text: str) -> None:
        """Forget old tokens if the text that is not out yet does not depend on them."""
        rest = text[self._num_out :]
        window = self._end_of(self._window)
        shorter = self._decode(window)
        is_valid = REPLACEMENT not in shorter or len(self._window) > 2 * MAX_WINDOW
        if is_valid and shorter.endswith(rest):
            self._window, self._num_out = window, len(shorter) - len(rest)

    def _end_of(self, token_ids: list[int]) -> list[int]:
        """The last tokens from a place that is not inside a character.

        If a run of byte tokens begins inside a character, the tokenizers library turns the whole run into U+FFFD, also
        its later tokens. In valid text one of four tokens in a row begins a character.
        """
        ends = [token_ids[-count:] for count in range(CONTEXT, CONTEXT + 4)]
        return next((end for end in ends if REPLACEMENT not in self._decode(end)), ends[0])

    def flush(self) -> str:
        """The rest of the text at the end of the output."""
        text = self._decode(self._window)
        rest, self._num_out = text[self._num_out :], len(text)
        return rest


def _common_prefix(first: str, second: str) -> str:
    differing = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(differing, min(len(first), len(second)))]
