"""Beam search without an engine: the sequences that it finds, and those that it keeps."""

from __future__ import annotations

import gc

import pytest

from quire.frontend.beam_search import BeamSearch
from quire.outputs import BeamSearchSequence, Logprob
from quire.sampling_params import BeamSearchParams

EOS = 0
CHOICES = {EOS: Logprob(-3.0), 1: Logprob(-0.25), 2: Logprob(-4.0)}


def search(num_steps: int, **fields: float) -> BeamSearch:
    """After steps that all gave the same choices to every beam."""
    found = BeamSearch([7], BeamSearchParams(beam_width=2, max_tokens=num_steps, **fields), [EOS])
    while beams := found.pending():
        found.advance([CHOICES] * len(beams))
    return found


def num_sequences() -> int:
    gc.collect()
    return sum(isinstance(each, BeamSearchSequence) for each in gc.get_objects())


def test_memory_does_not_grow_with_the_ends_that_were_found() -> None:
    """Each step finds ends, and each has all tokens before it: a long answer of a few beams would take gigabytes."""
    before = num_sequences()
    found = search(200)
    assert num_sequences() - before <= 4, "two beams and their two best ends"
    assert len(found.result().sequences) == 2


@pytest.mark.parametrize(
    ("length_penalty", "tokens"),
    [(0.0, [[7, 1, 1], [7, EOS]]), (1.0, [[7, 1, 1], [7, 1, 2]]), (10.0, [[7, 1, 1], [7, 1, 2]])],
)
def test_ends_and_cut_beams_are_ranked_together(length_penalty: float, tokens: list[list[int]]) -> None:
    """The length penalty decides between an early end and a longer beam that is less probable."""
    best = search(2, length_penalty=length_penalty).result().sequences
    assert [sequence.tokens for sequence in best] == tokens
    assert [sequence.stop_reason for sequence in best] == [EOS if each[-1] == EOS else None for each in tokens]
