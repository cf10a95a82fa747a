"""The table that `quire quality` prints."""

from __future__ import annotations

from collections.abc import Sequence

from quire.demo import DEMO_MODEL_NAME
from quire.quality.measure import Loaded, Row, Text
from quire.quality.summary import Estimate
from quire.resolve import shown_bytes

_HEAD = ("", "weights", "perplexity", "ratio", "KL mean (nats)", "KL 99 %", "same top token")


def base_name(name: str | None, base: Loaded) -> str:
    """The name of the base, with its dtype."""
    return f"{name or DEMO_MODEL_NAME}, {base.dtype}"


def text(text: Text, base: str, file: str, rows: Sequence[Row]) -> str:
    """The result as text for people."""
    perplexity = rows[0].quality.base_perplexity
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    longest = max(map(len, text.windows))
    return "\n".join(
        [
            f"base   {base}: perplexity {_shown(perplexity, 4)}",
            f"text   {file}: {text.num_tokens:,} tokens in {len(text.windows)} windows of up to {longest:,}, "
            f"{text.num_predicted:,} of them predicted",
            "",
            *table,
            "",
            "KL(base || model) and ratio: 0 and 1 if nothing was lost. [a, b]: 95 % confidence interval over windows.",
        ]
    )


def _cells(row: Row) -> tuple[str, ...]:
    quality = row.quality
    agreement = quality.top_token_agreement
    percent = Estimate(
        100 * agreement.value, agreement.interval and (100 * agreement.interval[0], 100 * agreement.interval[1])
    )
    return (
        row.name,
        shown_bytes(row.weight_bytes),
        f"{quality.perplexity.value:.4f}",
        _shown(quality.perplexity_ratio, 4),
        _shown(quality.kl_mean, 5),
        f"{quality.kl_p99:.4f}",
        _shown(percent, 2) + " %",
    )


def _shown(estimate: Estimate, digits: int) -> str:
    value = f"{estimate.value:.{digits}f}"
    if estimate.interval is None:
        return value
    return f"{value} [{estimate.interval[0]:.{digits}f}, {estimate.interval[1]:.{digits}f}]"
