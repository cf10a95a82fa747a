"""Finds the sizes of steps that are worth their time: the knee of a step's rate. No torch.

As long as reading the weights takes longer than the products, more rows raise the rate of a step. Beyond this knee,
more rows make the step longer, and the rate hardly rises. The constants come from data sheets and are never measured.
So a machine chooses the same sizes at every start.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace

from quire.cost.arithmetic import Load, StepArithmetic
from quire.cost.devices import Ceilings
from quire.cost.step_time import Constants, prior, step_seconds

# The shares of a data sheet's rates that good kernels reach when they read weights, and in products of some hundred
# rows. They are assumed for devices on which no step has run.
REACHED_BANDWIDTH, REACHED_FLOPS = 0.75, 0.5
# 2 us are the scheduler's and the output's (benchmarks/NOTES.md), the rest is for sampling in a batch: assumed.
DESCRIBED_ROW_SECONDS = 5e-6
# Launches and small kernels of a layer on a GPU, within a graph: assumed.
DESCRIBED_LAYER_SECONDS = 20e-6
SHORT_CONTEXT = 16  # tokens of each request that decodes: the knee of longer contexts comes earlier
PROMPT_UNIT = 32  # tokens
_ENDLESS = 1 << 30  # rows of a step whose rate more rows do not raise


def described_constants(arithmetic: StepArithmetic, described: Ceilings, *, is_gpu: bool) -> Constants:
    """The needs of a model's steps on a device that is only described."""
    guess = prior(REACHED_BANDWIDTH * described.read_bandwidth, REACHED_FLOPS * described.flops)
    per_step = guess.per_step + is_gpu * arithmetic.num_layers * DESCRIBED_LAYER_SECONDS
    return replace(guess, per_step=per_step, per_logit_row=DESCRIBED_ROW_SECONDS)


class Knee:
    """The rates that steps of one model reach on one device."""

    def __init__(self, arithmetic: StepArithmetic, constants: Constants) -> None:
        self._arithmetic, self._constants = arithmetic, constants
        self._decode = arithmetic.load([SHORT_CONTEXT], [1], 1)

    def prompt_tokens(self, share: float) -> int:
        """The tokens of a step with which prompts reach about this share of the rate of endless steps.

        It is a power of two.
        """
        nothing = (0,) * len(self._arithmetic.kinds)
        return _power_of_two(self._size(share, lambda count: _with_prompt(Load(0, 0, 0, nothing, nothing), count)))

    def prompt_tokens_beside(self, num_answers: int, context: int, times: float) -> int:
        """The prompt tokens with which a step of some decodes takes about `times` as long.

        It is a multiple of PROMPT_UNIT.
        """
        answers = self._arithmetic.load([context - 1] * num_answers, [1] * num_answers, num_answers)
        most = times * self._seconds(answers)
        size = bisect_right(range(_ENDLESS), most, key=lambda count: self._seconds(_with_prompt(answers, count)))
        return max(round(size / PROMPT_UNIT), 1) * PROMPT_UNIT

    def requests(self, share: float) -> int:
        """The rows with which decodes reach about this share of the rate of endless steps. It is a power of two."""
        one = self._decode

        def load(count: int) -> Load:
            kv_tokens, pairs = (tuple(count * each for each in sums) for sums in (one.kv_tokens, one.pairs))
            return Load(count, count, count, kv_tokens, pairs)

        return _power_of_two(self._size(share, load))

    def _size(self, share: float, load: Callable[[int], Load]) -> int:
        """The fewest rows with which a step reaches a share of the rate of endless ones."""
        wanted = share * _ENDLESS / self._seconds(load(_ENDLESS))
        return bisect_left(range(1, _ENDLESS), wanted, key=lambda count: count / self._seconds(load(count)))

    def _seconds(self, load: Load) -> float:
        return step_seconds(self._arithmetic.demand(load), self._constants)


def _with_prompt(beside: Load, count: int) -> Load:
    """Attention between the prompt's tokens is left out: it does not depend on the length of steps."""
    return beside._replace(
        num_tokens=beside.num_tokens + count, num_rows=beside.num_rows + 1, num_logits=beside.num_logits + 1
    )


def _power_of_two(size: int) -> int:
    return 1 << round(math.log2(size))
