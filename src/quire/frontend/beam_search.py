"""Beam search as a state machine over token ids. It names sequences to extend and takes their next-token logprobs.

The engine sees ordinary one-token requests, and the prefix cache keeps each beam's KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.outputs import BeamSearchOutput, BeamSearchSequence, PositionLogprobs
from quire.sampling_params import BeamSearchParams, SamplingParams


class BeamSearch:
    """One prompt. Call `pending`, extend each by one token, give the logprobs to `advance`, until `pending` is empty.

    As in vLLM, sequences are ranked by cumulative logprob / length ** length_penalty. The length does not count EOS.
    """

    def __init__(self, prompt_token_ids: Sequence[int], params: BeamSearchParams, eos_token_ids: Iterable[int]) -> None:
        self._params = params
        self._num_prompt_tokens = len(prompt_token_ids)
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._beams = [BeamSearchSequence(list(prompt_token_ids))]
        self._finished: list[BeamSearchSequence] = []

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
        candidates: list[BeamSearchSequence] = []
        for beam, choices in zip(self._beams, logprobs, strict=True):
            for token_id, choice in choices.items():
                extended = BeamSearchSequence(
                    [*beam.tokens, token_id], beam.cum_logprob + choice.logprob, [*beam.logprobs, choices]
                )
                if token_id in self._eos:
                    extended.finish_reason, extended.stop_reason = "stop", token_id
                    self._finished.append(extended)
                else:
                    candidates.append(extended)
        self._beams = sorted(candidates, key=self._score, reverse=True)[: self._params.beam_width]

    def result(self) -> BeamSearchOutput:
        """The best sequences, finished or cut at max_tokens, best first."""
        for beam in self._beams:
            beam.finish_reason = "length"
        best = sorted(self._finished + self._beams, key=self._score, reverse=True)
        return BeamSearchOutput(best[: self._params.beam_width])

    def _score(self, sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return sequence.cum_logprob / float(length**self._params.length_penalty)
