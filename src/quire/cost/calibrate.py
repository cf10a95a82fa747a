"""Constants of step times from measured steps: the choice of steps to measure, and the fit to them.

The fit is a maximum a posteriori fit in the logarithms of the constants, by Gauss-Newton steps. With few measured
steps the constants stay near the machine's ceilings; with many they follow the steps. Errors count by Cauchy's loss
(Barron 2019, arXiv:1701.03077, alpha = 0), so one delayed step does not bend the rest, even if it is far off.

A fit comes closer to the steps that it was made from than to others. So the interval is taken from the errors that each
step would have if it were left out (the leverage of linear least squares, Cook and Weisberg 1982). The constants are
fitted to the fastest moments of a machine, and the interval is one of all its moments: it knows all times of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.cost.arithmetic import Demand
from quire.cost.correct import possible_spread
from quire.cost.overhead import Overhead
from quire.cost.step_time import Constants, amounts, exchange_seconds

Array = np.ndarray[Any, np.dtype[np.float64]]
Rows = list[tuple[int, int]]  # (tokens before, new tokens) of each sequence of a step

STEP_NOISE = 0.03  # relative, of one measured step: the unit of errors in the fit
WILD_NOISES = 3.0  # errors beyond this many noises count less and less
PRIOR_WIDTH = 1.5  # standard deviation of the logarithm of a constant: a factor of 4.5
OVERLAP_WIDTH = 0.5
GAUSS_NEWTON_STEPS = 100
SMALLEST_STEP = 1e-4  # step of a logarithm: what is left to gain is far below the noise of one measured step
TINY = np.finfo(float).tiny  # a divisor in place of 0
FEW_STEPS = 4  # with this number of measured steps or fewer, the interval is wide
FEW_STEPS_SPREAD = 0.5
SHORT_CONTEXT = 16
LONG_CONTEXT = 2048
CACHE_BYTES = 512 << 20  # measured steps touch at most this part of the KV cache
# Tokens. CPU kernels go over whole steps of 32 tokens of a context, so a context of a little more costs as much as one
# of 32 more. In the middle of a step the error is the least.
HALF_STEP = 16


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step and its time.

    Attributes:
        seconds: the time that counts for the constants.
        times: all its times, if it was measured several times.
    """

    demand: Demand
    seconds: float
    times: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants, and how far steps are from them.

    Attributes:
        spread: nine of ten steps that were not measured lie within the ratio 1 + spread of the fit.
        factors: size of a step (see cost/correct.py) -> measured over fitted time of the steps that ran later.
        cold: seconds that a step takes longer after an endless pause (see cost/correct.py).
        overhead: the time of a request outside the engine; None: no server has measured it.
    """

    constants: Constants
    spread: float
    factors: Mapping[int, float] = field(default_factory=dict)
    cold: float = 0.0
    overhead: Overhead | None = None

    def slower(self, ratio: float) -> Fit:
        """The same with steps that take `ratio` times as long."""
        slower = Constants(*(ratio * each for each in self.constants.fitted), links=self.constants.links.slower(ratio))
        return replace(self, constants=replace(slower, overlap=self.constants.overlap), cold=ratio * self.cold)


def points(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_tokens: int, block_size: int
) -> Iterator[Rows]:
    """The steps to measure: first short decodes of several sizes and short prompts, then both after a long context.

    After a context, decodes show the cost of reading keys and values, and prompts show the cost of products with them.
    The first of these prompts is short, so that a slow machine can measure it too.

    Args:
        num_tokens: The KV cache that the rows of a step may have together. Every row has its own blocks.
    """

    def decodes(num_rows: int, length: int) -> Rows:
        room = num_tokens // num_rows // block_size * block_size
        return [(max(min(length, max_model_len - HALF_STEP - 1, room - HALF_STEP - 1), 1), 1)] * num_rows

    several, context = min(SHORT_CONTEXT, max_model_len - 1), min(LONG_CONTEXT, max_model_len, num_tokens)
    wished: list[Rows] = [
        decodes(1, several),
        decodes(4, several),
        [(0, 32)],
        decodes(16, several),
        [(0, 128)],
        decodes(32, several),
        decodes(8, several),
        decodes(2, several),
        [(0, 64)],
        decodes(64, several),
        decodes(1, context),
        decodes(2, context),
        [(max(context - 32, 0), 32)],
        decodes(8, context),
        [(max(context - 128, 0), 128)],
        decodes(32, context),
        [(0, 256)],
        [(0, 512)],
    ]
    for rows in wished:
        lengths = [start + count for start, count in rows]
        fits = len(rows) <= max_num_seqs and sum(count for _, count in rows) <= max_num_batched_tokens
        num_slots = sum(-(-length // block_size) * block_size for length in lengths)
        if fits and max(lengths) <= max_model_len and num_slots <= num_tokens:
            yield rows


def fit(steps: Sequence[MeasuredStep], guess: Constants) -> Fit:
    """The constants that explain the steps best. Every constant is positive, and the overlap at least 1.

    The guess's links stay. A measured step contains its exchanges, so the other constants explain the rest of its time.
    """
    start = _to_logs(guess)
    widths = np.full(len(start), PRIOR_WIDTH)
    widths[-1] = OVERLAP_WIDTH
    measured = np.log([step.seconds for step in steps])
    demands = np.array([amounts(step.demand) for step in steps], dtype=float).reshape(len(steps), len(start) - 1)
    exchanges = np.array([exchange_seconds(step.demand, guess.links) for step in steps])

    def log_errors(logs: Array) -> Array:
        log_seconds: Array = np.log(all_seconds(demands, _from_logs(logs)) + exchanges)
        return log_seconds - measured

    def errors(logs: Array) -> Array:
        """[..., step and constant]. The fit minimizes the sum of their squares."""
        size = log_errors(logs) / STEP_NOISE
        of_steps = WILD_NOISES * np.sqrt(np.log1p((size / WILD_NOISES) ** 2))
        return np.concatenate([of_steps, (logs - start) / widths], axis=-1)

    logs, damping, changes = start.copy(), 1e-2, 1e-5 * np.eye(len(start))
    current = errors(logs)
    for _ in range(GAUSS_NEWTON_STEPS):
        slopes = (errors(logs + changes) - current).T / 1e-5
        square = slopes.T @ slopes
        step = np.linalg.solve(square + damping * np.diag(np.diag(square)), slopes.T @ current)
        tried = errors(logs - step)
        if tried @ tried < current @ current:
            logs, current, damping = logs - step, tried, damping / 4
        else:
            damping *= 8
        if np.abs(step).max() < SMALLEST_STEP:
            break
    spread = FEW_STEPS_SPREAD
    if len(steps) > FEW_STEPS:
        slopes = (errors(logs + changes) - current).T / 1e-5
        of_steps = slopes[: len(steps)]
        leverages = np.einsum("ij,ji->i", of_steps, np.linalg.solve(slopes.T @ slopes, of_steps.T))
        left_out = log_errors(logs) / (1 - leverages)
        times = [np.log(step.times or (step.seconds,)) for step in steps]
        delays = [each - seconds for each, seconds in zip(times, measured, strict=True)]
        errors_of_times = np.concatenate([error - delay for error, delay in zip(left_out, delays, strict=True)])
        # A further step is below the n-th smallest of N errors with a chance of n / (N + 1). The times of one step are
        # no further steps, so N is the number of steps.
        num_steps, num_times = len(steps), len(errors_of_times)
        share = 0.9 * (1 + 1 / num_steps) / (1 + 1 / num_times)
        spread = float(np.expm1(np.quantile(np.abs(errors_of_times), min(share, 1.0), method="weibull")))
    return Fit(Constants(*_from_logs(logs).tolist(), links=guess.links), possible_spread(spread))


def all_seconds(demands: Array, constants: Array) -> Array:
    """The result of `step_seconds` for each step without its exchanges, by each set of constants.

    A fit asks for thousands of times between the steps of a running engine. One by one they would take 20 ms, together
    they take 1 to 3.

    Args:
        demands: [step, amount].
        constants: [..., constant], in the order of `Constants.fitted`.

    Returns: [..., step], in seconds.
    """
    amounts_of, overlap = demands.T, constants[..., -1:]
    weights, operations = constants[..., 2:3] * amounts_of[2], constants[..., 3:4] * amounts_of[3]
    longer, shorter = np.maximum(weights, operations), np.minimum(weights, operations)
    overlapped = longer * np.exp(np.log1p((shorter / np.maximum(longer, TINY)) ** overlap) / overlap)
    return np.asarray(constants[..., :2] @ amounts_of[:2] + overlapped + constants[..., 4:-1] @ amounts_of[4:])


def _to_logs(constants: Constants) -> Array:
    *seconds, overlap = constants.fitted
    return np.log([*seconds, overlap - 1])


def _from_logs(logs: Array) -> Array:
    """[..., constant]."""
    numbers = np.exp(logs)
    numbers[..., -1] += 1
    return numbers
