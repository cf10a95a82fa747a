"""The whole text pipeline on real tokenizers: tokens in any cut, stop strings across tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.text.pipeline import TextPipeline
from tests.text.small_tokenizers import BYTE_KINDS, UNUSUAL_KINDS
from tests.text.test_detokenizer import cuts_of, ids_of, tokenizer_of
from tests.text.test_stop import first_match


@pytest.mark.parametrize("kind", BYTE_KINDS + UNUSUAL_KINDS)
@given(data=st.data(), include=st.booleans())
def test_streamed_is_not_streamed(kind, data, include):
    tokenizer, ids = tokenizer_of(kind), ids_of(data, kind)
    whole = tokenizer.decode(ids)
    inner = whole[len(whole) // 3 : len(whole) // 3 + data.draw(st.integers(1, 4))]
    stops = [stop for stop in (inner, data.draw(st.text("the x", min_size=1, max_size=3))) if stop]
    pipeline = TextPipeline(tokenizer.new_detokenizer(), stops, include_stop=include)
    out, num_used, matched = "", 0, None
    for piece in cuts_of(data, ids):
        delta = pipeline.push(piece)
        out, num_used = out + delta.text, num_used + delta.num_tokens
        if delta.stop is not None:
            matched = delta.stop
            break
    expected = first_match(whole, stops)
    if matched is None:
        flushed = tokenizer.new_detokenizer()
        pushed = flushed.push(ids)
        assert expected is None or expected[0] > len(pushed), "a stop string was missed"
        assert out + pipeline.finish() == whole
        assert num_used == len(ids)
        return
    end, stop = expected
    assert matched == stop
    assert out == whole[: end if include else end - len(stop)]
    before = tokenizer.new_detokenizer()
    assert len(before.push(ids[: num_used - 1])) < end, "tokens after the match were used"


def test_tokens_up_to_the_one_that_completes_the_match():
    tokenizer = tokenizer_of("gemma")
    ids = [tokenizer.token_to_id(char) for char in "abcdef"]
    pipeline = TextPipeline(tokenizer.new_detokenizer(), ["cd"])
    assert pipeline.push(ids) == ("ab", 4, "cd")


def test_min_tokens_counts_tokens():
    tokenizer = tokenizer_of("gemma")
    ids = [tokenizer.token_to_id(char) for char in "abcabc"]
    assert TextPipeline(tokenizer.new_detokenizer(), ["c"], min_tokens=3).push(ids) == ("abcab", 6, "c")
    assert TextPipeline(tokenizer.new_detokenizer(), ["c"], min_tokens=2).push(ids) == ("ab", 3, "c")
