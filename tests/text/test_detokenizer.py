"""Streamed text is the whole text: for any tokens, any cut, and every kind of decoder."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import demo
from quire.frontend.text.detokenizer import MAX_WINDOW, ByteDetokenizer, WindowDetokenizer, compile_decoder
from quire.frontend.tokenizer import Tokenizer
from tests.text.small_tokenizers import BYTE_KINDS, UNUSUAL_KINDS, build

REPLACEMENT = "\ufffd"
TOKENIZER = Tokenizer.from_folder(demo.path("target"))


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(build(kind))


def cuts_of(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """`ids` in random pieces, some of them empty."""
    bounds = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[start:end] for start, end in zip([0, *bounds], [*bounds, len(ids)], strict=True)]


def ids_of(data: st.DataObject, kind: str, max_size: int = 30) -> list[int]:
    """Any token ids, a few of them unknown; or the ids of a text, which are mostly whole characters."""
    tokenizer = tokenizer_of(kind)
    if data.draw(st.booleans()):
        return tokenizer.encode(data.draw(st.text(max_size=max_size)))
    return data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=max_size))


@pytest.mark.parametrize("kind", BYTE_KINDS + UNUSUAL_KINDS)
@given(data=st.data(), skip=st.booleans(), spaces=st.booleans())
def test_any_cut_gives_the_whole_text(kind, data, skip, spaces):
    tokenizer, ids = tokenizer_of(kind), ids_of(data, kind)
    detokenizer = tokenizer.new_detokenizer((), skip, spaces)
    pieces = [detokenizer.push(piece) for piece in cuts_of(data, ids)]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip, spaces)


@given(data=st.data(), skip=st.booleans())
def test_byte_level_is_what_the_library_decodes(data, skip):
    ids = ids_of(data, "byte_level")
    assert tokenizer_of("byte_level").decode(ids, skip) == build("byte_level").decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace", *UNUSUAL_KINDS])
@given(data=st.data(), skip=st.booleans())
def test_other_kinds_are_what_the_library_decodes(kind, data, skip):
    """Where the library finds no invalid bytes: of those it makes one U+FFFD per token of the run, we one per error."""
    ids = ids_of(data, kind)
    expected = build(kind).decode(ids, skip_special_tokens=skip)
    ours = tokenizer_of(kind).decode(ids, skip)
    if REPLACEMENT in expected and kind in (*BYTE_KINDS, "regex_replace"):
        assert REPLACEMENT in ours or expected.count(REPLACEMENT) > ours.count(REPLACEMENT)
    else:
        assert ours == expected


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(text=st.text(max_size=20))
def test_text_comes_out_with_its_last_token(kind, text):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.new_detokenizer()
    assert detokenizer.push(ids) == tokenizer.decode(ids), "whole characters were held back"


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("text", ["a quick 😀 fox", "你好 the", "  the é"])
def test_output_after_a_prompt_is_the_rest_of_the_text(kind, text):
    """Its leading space is kept, and a character that the prompt begins is completed."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        if not prompt:
            continue
        detokenizer = tokenizer.new_detokenizer(ids[:cut])
        output = detokenizer.push(ids[cut:]) + detokenizer.flush()
        assert prompt.rstrip(REPLACEMENT) + output == whole


def test_a_prompt_without_text_does_not_count():
    tokenizer = tokenizer_of("llama")
    begin, the = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("▁the")
    assert tokenizer.new_detokenizer([begin]).push([the]) == "the"
    assert tokenizer.new_detokenizer([begin], skip_special_tokens=False).push([the]) == " the"
    assert tokenizer.new_detokenizer([the]).push([the]) == " the"


def test_only_the_end_of_a_prompt_is_read():
    """With byte-level BPE, whose texts do not depend on what came before: prompts are long, and n is up to 128."""

    class Prompt(list[int]):
        def __iter__(self):
            raise AssertionError("the whole prompt was read")

        __reversed__ = __iter__

    special = TOKENIZER.eos_token_id
    text = TOKENIZER.encode("é the", add_special_tokens=False)
    for begin in range(len(text)):
        detokenizer = TOKENIZER.new_detokenizer(Prompt([special] * 100 + text[:begin]))
        before = TOKENIZER.decode(text[:begin]).rstrip(REPLACEMENT)
        assert before + detokenizer.push(text[begin:]) + detokenizer.flush() == "é the"


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_skipped_tokens_are_not_the_first(kind):
    tokenizer = tokenizer_of(kind)
    begin, the = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("▁the")
    for ids in ([begin, the, the], [begin, begin, the], [tokenizer.vocab_size + 1, the]):
        assert tokenizer.decode(ids) == build(kind).decode(ids)


def test_incomplete_characters_are_held_back_and_flushed():
    tokenizer = tokenizer_of("gemma")
    smile = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    detokenizer = tokenizer.new_detokenizer()
    assert [detokenizer.push([token_id]) for token_id in smile] == ["", "", "", "😀"]
    assert detokenizer.push(smile[:3]) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert tokenizer.decode([*smile, smile[0], tokenizer.token_to_id("a")]) == f"😀{REPLACEMENT}a"


def test_special_tokens_are_skipped_or_kept():
    for kind in (*BYTE_KINDS, "no_decoder"):
        tokenizer = tokenizer_of(kind)
        names = ["<s>", "<tool call>", "</s>"]
        ids = [tokenizer.token_to_id(name) for name in names]
        assert tokenizer.decode(ids) == "<tool call>"
        assert tokenizer.decode(ids, False, False) == "<s><tool call></s>"
    assert tokenizer_of("no_decoder").decode(ids, False, True) == "<s> <tool call> </s>"


def test_unusual_decoders_forget_old_tokens():
    tokenizer = tokenizer_of("suffix")
    word = tokenizer.token_to_id("fox</w>")
    detokenizer = tokenizer.new_detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    num_tokens = 5 * MAX_WINDOW
    text = "".join(detokenizer.push([word]) for _ in range(num_tokens)) + detokenizer.flush()
    assert text == " ".join(["fox"] * num_tokens)
    assert len(detokenizer._window) <= MAX_WINDOW


@pytest.mark.parametrize("character", ["é", "你", "😀"])
@pytest.mark.parametrize("num_prompt", [0, 7, 20])
def test_a_window_does_not_begin_inside_a_character(character, num_prompt):
    """A run of byte tokens that is longer than the window; the library makes U+FFFD of one that begins elsewhere."""
    tokenizer = tokenizer_of("regex_replace")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in f"a{character * 5 * MAX_WINDOW}".encode()]
    start = 1 + num_prompt * len(character.encode())
    detokenizer = tokenizer.new_detokenizer(ids[:start])
    text = "".join(detokenizer.push([token_id]) for token_id in ids[start:]) + detokenizer.flush()
    assert text == character * (5 * MAX_WINDOW - num_prompt)


def test_usual_decoders_take_the_byte_path():
    for kind in BYTE_KINDS:
        assert isinstance(tokenizer_of(kind).new_detokenizer(), ByteDetokenizer), kind


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Replace", "pattern": {"String": "a"}, "content": "b"},
            ],
        },
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
        None,
    ],
)
def test_what_is_not_understood_is_not_guessed(decoder):
    assert compile_decoder(decoder) is None
