"""The numbers of a comparison and their confidence intervals."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from quire.measure.statistics import LEVEL, t_quantile
from quire.quality.divergence import Positions

TAIL = 0.99  # the report has this quantile of the divergence beside its mean


@dataclass(frozen=True)
class Estimate:
    """A value and its confidence interval, from a low to a high end; None: a single window shows no spread."""

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Quality:
    """A model against its base on a text.

    Attributes:
        num_tokens: compared positions: all tokens except the first of each window.
        perplexity: exp of the mean of -log p(next token).
        perplexity_ratio: perplexity / base_perplexity; its interval comes from the paired differences.
        kl_mean: mean Kullback-Leibler divergence of base || model, nats.
        kl_p99: 99th percentile of the divergence over positions.
        top_token_agreement: share of positions where both models find the same token most likely.
    """

    num_tokens: int
    num_windows: int
    base_perplexity: Estimate
    perplexity: Estimate
    perplexity_ratio: Estimate
    kl_mean: Estimate
    kl_p99: float
    top_token_agreement: Estimate

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(windows: list[Positions]) -> Quality:
    """The numbers over all windows. Their intervals count windows, not positions, as independent of each other."""
    everything = Positions.joined(windows)
    return Quality(
        num_tokens=len(everything),
        num_windows=len(windows),
        base_perplexity=_exp(_mean([window.base_nll for window in windows])),
        perplexity=_exp(_mean([window.nll for window in windows])),
        perplexity_ratio=_exp(_mean([window.nll - window.base_nll for window in windows])),
        kl_mean=_mean([window.kl for window in windows]),
        kl_p99=float(np.quantile(everything.kl.numpy(), TAIL)),
        top_token_agreement=_mean([window.agrees for window in windows]),
    )


def _mean(windows: list[Tensor]) -> Estimate:
    """The mean over all positions, with the interval of a ratio of sums over windows (Cochran 1977, section 6.3)."""
    sums = np.array([window.sum().item() for window in windows])
    counts = np.array([len(window) for window in windows])
    mean = sums.sum() / counts.sum()
    if len(windows) < 2:
        return Estimate(mean)
    variance = ((sums - mean * counts) ** 2).sum() * len(windows) / (len(windows) - 1) / counts.sum() ** 2
    half = t_quantile(LEVEL, len(windows) - 1) * math.sqrt(variance)
    return Estimate(float(mean), (float(mean - half), float(mean + half)))


def _exp(of: Estimate) -> Estimate:
    interval = of.interval and (math.exp(of.interval[0]), math.exp(of.interval[1]))
    return Estimate(math.exp(of.value), interval)
