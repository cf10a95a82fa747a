"""Beam search as a state machine over token ids. It names sequences to extend and takes their next-token logprobs.

The engine sees ordinary one-token requests, and the prefix cache keeps each beam's KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from quire.outputs import BeamSearchOutput, BeamSearchSequence, PositionLogprobs
from quire.sampling_params import BeamSearchParams, SamplingParams


class _Extension(NamedTuple):
    """A beam with one more token. Its lists are copied only if it is among the best."""

    beam: BeamSearchSequence
    token_id: int
    cum_logprob: float
    choices: PositionLogprobs

    def sequence(self, finish_reason: Literal["stop"] | None = None) -> BeamSearchSequence:
        return BeamSearchSequence(
            [*self.beam.tokens, self.token_id],
            self.cum_logprob,
            [*self.beam.logprobs, self.choices],
            finish_reason=finish_reason,
            stop_reason=None if finish_reason is None else self.token_id,
        )


class BeamSearch:
    """One prompt. Call `pending`, extend each by one token, give the logprobs to `advance`, until `pending` is empty.

    As in vLLM, sequences are ranked by cumulative logprob / length ** length_penalty. The length does not count EOS.
    """

    def __init__(self, prompt_token_ids: Sequence[int], params: BeamSearchParams, eos_token_ids: Iterable[int]) -> None:
        self._params = params
        self._num_prompt_tokens = len(prompt_token_ids)
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._beams = [BeamSearchSequence(list(prompt_token_ids))]
        self._finished: list[BeamSearchSequence] = []  # the best ones: their scores do not change any more

    def step_params(self) -> SamplingParams:
        """Parameters of the one-token request that extends a beam. Twice the width is enough if every beam ends."""
        return SamplingParams(
            temperature=self._params.temperature,
            max_tokens=1,
            logprobs=2 * self._params.beam_width,
            ignore_eos=True,
            seed=0,
            detokenize=False,
        )

    def pending(self) -> list[list[int]]:
        """Token ids of the sequences to extend; empty when the search is over."""
        if not self._beams or len(self._beams[0].tokens) - self._num_prompt_tokens >= self._params.max_tokens:
            return []
        return [beam.tokens for beam in self._beams]

    def advance(self, logprobs: Sequence[PositionLogprobs]) -> None:
        """Take the next-token logprobs of each pending sequence, in its order."""
        found = [
            _Extension(beam, token_id, beam.cum_logprob + choice.logprob, choices)
            for beam, choices in zip(self._beams, logprobs, strict=True)
            for token_id, choice in choices.items()
        ]
        ends = [extension.sequence("stop") for extension in self._most_likely(found, is_end=True)]
        self._finished = self._best(self._finished + ends)
        self._beams = [extension.sequence() for extension in self._most_likely(found, is_end=False)]

    def _most_likely(self, found: Sequence[_Extension], *, is_end: bool) -> list[_Extension]:
        """The best of the extensions that end a sequence, or of the others. They all have the same length."""
        chosen = [extension for extension in found if (extension.token_id in self._eos) is is_end]
        return sorted(chosen, key=lambda extension: extension.cum_logprob, reverse=True)[: self._params.beam_width]

    def _best(self, sequences: Sequence[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self._score, reverse=True)[: self._params.beam_width]

    def result(self) -> BeamSearchOutput:
        """The best sequences, finished or cut at max_tokens, best first."""
        for beam in self._beams:
            beam.finish_reason = "length"
        return BeamSearchOutput(self._best(self._finished + self._beams))

    def _score(self, sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return sequence.cum_logprob / float(length**self._params.length_penalty)
