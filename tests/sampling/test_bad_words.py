"""Bad words: the forbidden tokens after an output are exactly those that would spell a word of the list."""

from __future__ import annotations

import random
import re
import sys
from types import FrameType
from typing import Any

import msgspec
import pytest
import tokenizers

from quire.frontend.text import bad_words
from quire.frontend.text.bad_words import WordIndex
from quire.frontend.tokenizer import Tokenizer
from quire.sampling.bad_words import BadWords
from quire.sampling_params import SamplingParams, SpelledWords
from tests.text.small_tokenizers import BYTE_KINDS, UNUSUAL_KINDS, build

WORDS = ["the", "quick fox", "er", "a", "!", "..!", "x_the", "The"]


def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(build(kind))


def spelled(kind: str, words: list[str]) -> SpelledWords:
    index = tokenizer(kind).words
    assert index is not None
    return msgspec.msgpack.decode(msgspec.msgpack.encode(index.spell(words)), type=SpelledWords)


def is_completed(word: str, before: str, after: str) -> bool:
    """By the text alone: whether the added text ends the word, which began at a boundary."""
    left = r"(?<!\w)" if re.match(r"\w", word) else ""
    right = r"(?!\w)" if re.search(r"\w$", word) else ""
    found = re.finditer(f"(?={left}{re.escape(word)}{right})", after)
    return any(match.start() + len(word) > len(before) for match in found)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_exactly_what_would_complete_a_word_is_forbidden(kind: str) -> None:
    """Random outputs of the pieces of these words: every way of cutting them into tokens comes."""
    own = tokenizer(kind)
    texts = {i: own.token_bytes(i) for i in range(own.vocab_size)}
    ascii_texts = {i: data.decode() for i, data in texts.items() if data.isascii() and data}
    pieces = [i for i, text in ascii_texts.items() if set(text) <= set("theTquickfoxra!. _\n")]
    choose = random.Random(1)
    words, text = BadWords(spelled(kind, WORDS), [], [], own.vocab_size), ""
    output: list[int] = []
    num_forbidden = 0
    for _ in range(60):
        forbidden = {*words.always, *words.forbidden_after(())}
        end = text[-20:]
        expected = {
            i for i, piece in ascii_texts.items() if any(is_completed(word, end, end + piece) for word in WORDS)
        }
        assert forbidden & set(ascii_texts) == expected, f"after {end!r}"
        num_forbidden += len(expected - set(words.always))
        token = choose.choice([i for i in pieces if i not in forbidden])
        words.append(token)
        output.append(token)
        text += ascii_texts[token]
    assert num_forbidden > 20, "hardly anything depended on the output"
    assert not re.search(r"(?<!\w)(the|er|a|quick fox|x_the|The)(?!\w)|!", text)
    resumed = BadWords(spelled(kind, WORDS), [], output, own.vocab_size)
    assert set(resumed.forbidden_after(())) == set(words.forbidden_after(()))


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
@pytest.mark.parametrize("word", ["déjà", "你好", "好", "😀"])
def test_characters_of_several_bytes(kind: str, word: str) -> None:
    """Byte by byte, after a letter only where the script has no spaces, and after any other text."""
    own = tokenizer(kind)
    vocabulary = {own.token_bytes(i): i for i in range(own.vocab_size)}
    spelling = [vocabulary[bytes([byte])] for byte in word.encode() if bytes([byte]) in vocabulary]
    assert len(spelling) == len(word.encode())
    for before, forbids in ((b"", True), (b" ", True), (b"q", word != "déjà")):
        words = BadWords(spelled(kind, [word]), [], [vocabulary[before]] if before else [], own.vocab_size)
        for token in spelling[:-1]:
            words.append(token)
        assert (spelling[-1] in words.forbidden_after(())) == forbids, f"after {before!r}"


def test_case_and_spaces_around_a_word() -> None:
    own = tokenizer("byte_level")
    the = own.encode(" the")
    assert len(the) == 1, "the case needs the word with its space as one token"
    for word, forbids in (("the", True), (" the", True), ("the ", True), ("The", False), ("th", False)):
        assert (the[0] in BadWords(spelled("byte_level", [word]), [], [], own.vocab_size).always) == forbids


@pytest.mark.parametrize(("token", "word"), [("</s>", "s"), ("<|end|>", "end"), ("</s>", "</s>"), ("<eos>", "eos")])
def test_special_tokens_and_the_end_of_sequence_are_never_forbidden(token: str, word: str) -> None:
    backend = tokenizers.Tokenizer.from_str(build("byte_level").to_str())
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([tokenizers.AddedToken("<eos>", special=False, normalized=False)])
    own = Tokenizer(backend, special_tokens={"eos_token": "<eos>"})
    assert own.words is not None
    spelling = own.words.spell([word]).words[0]
    assert own.token_to_id(token) not in {
        token_id for step in (spelling.anywhere, *spelling.steps) for token_id in step
    }


def test_tokens_without_logits_are_left_alone() -> None:
    own = tokenizer("byte_level")
    (the,) = own.encode(" the")
    assert the in BadWords(spelled("byte_level", ["the"]), [], [], the + 1).always
    assert the not in BadWords(spelled("byte_level", ["the"]), [], [], the).always


def lines_run(index: WordIndex, word: str) -> int:
    """How many lines of the index's module it takes to spell a word.

    The garbage collector may start at any line, and it runs functions of its own, such as Hypothesis' clock.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != bad_words.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        index.spell([word])
    finally:
        sys.settrace(before)
    return count


def test_spelling_costs_nothing_for_tokens_that_do_not_match() -> None:
    """Neither for many of them, of several words each, nor for the length of the longest."""
    few = [(i, byte.encode()) for i, byte in enumerate("the quick fox")]
    many = [(len(few) + i, f" {i} {i} {i}".encode()) for i in range(2000)] + [(5000, b"=" * 300)]
    word = "the quick fox " * 10
    assert lines_run(WordIndex([*few, *many]), word) == lines_run(WordIndex(few), word)


def test_a_long_list_travels_and_prints_short() -> None:
    words = spelled("byte_level", ["the"] * 128)
    params = SamplingParams(bad_words=["the"])
    params.bad_words_spelled = words
    assert len(repr(params)) < 2000
    params.verify(1000)


@pytest.mark.parametrize("kind", UNUSUAL_KINDS)
def test_tokens_without_a_text_of_their_own(kind: str) -> None:
    assert tokenizer(kind).words is None
