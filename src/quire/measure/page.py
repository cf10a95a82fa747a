"""A result as one HTML file with plots: inline SVG, no script, no other file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from quire.measure.load import Outcome, Run
from quire.measure.statistics import tokens_per_second, tpot

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 240, 64, 36, 12
MAX_POINTS = 400  # the most points of a curve; more points could not be seen
MAX_BARS = 300  # requests in the timeline
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1400px; margin: 2rem auto; padding: 0 1rem; color: #1f2937;
  background: #fff }
h1 { font-size: 1.3rem } h2 { font-size: 1rem; margin: 0 } figure { margin: 0 } svg { width: 100%; height: auto }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1.5rem }
pre { overflow-x: auto; background: #f3f4f6; padding: 1rem } text { font: 11px system-ui, sans-serif; fill: #4b5563 }
@media (prefers-color-scheme: dark) { body { color: #e5e7eb; background: #111827 } pre { background: #1f2937 }
  text { fill: #9ca3af } }
"""
Series = dict[str, list[tuple[float, float]]]


def serving_page(text: str, runs: Sequence[Run], result: dict[str, Any]) -> str:
    """The page of `quire bench serve` and of `quire simulate`.

    Args:
        text: the printed report.
    """
    done = [outcome for run in runs for outcome in run.outcomes if outcome.success]
    last = [outcome for outcome in runs[-1].outcomes if outcome.success]
    tokens, requests = tokens_per_second(last)
    plots = [
        plot("Time to first token", "ms", "% of requests", {"TTFT": _shares([o.ttft for o in done])}),
        plot(
            "Time per output token",
            "ms",
            "% of requests",
            {"TPOT": _shares([tpot(o) for o in done if o.output_tokens > 1])},
        ),
        plot("Inter-token latency", "ms", "% of gaps", {"ITL": _shares([gap for o in done for gap in o.itl])}),
        plot("End-to-end latency", "ms", "% of requests", {"E2EL": _shares([o.latency for o in done])}),
        plot("Output tokens, last round", "s", "tokens/s", {"tokens": _points(tokens)}),
        plot("Requests in flight, last round", "s", "requests", {"requests": _points(requests)}),
        _timeline(last),
    ]
    command = "bench serve" if result.get("simulated") is None else "simulate"
    return page(f"quire {command}: {result.get('model_id')}", text, plots)


def page(title: str, text: str, plots: Sequence[str]) -> str:
    """A whole document around plots and the printed report."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f'<body><h1>{escape(title)}</h1><div class="plots">{"".join(plots)}</div><pre>{escape(text)}</pre>'
        "</body></html>\n"
    )


def plot(title: str, x_unit: str, y_unit: str, series: Series) -> str:
    """Curves over one pair of axes, which begin at 0, as an SVG figure."""
    points = [point for own in series.values() for point in own]
    x_max = _round_up(max((x for x, _ in points), default=1.0))
    y_max = _round_up(max((y for _, y in points), default=1.0))

    def place(x: float, y: float) -> str:
        return (
            f"{LEFT + x / x_max * (WIDTH - LEFT - 16):.1f},{HEIGHT - BOTTOM - y / y_max * (HEIGHT - BOTTOM - TOP):.1f}"
        )

    curves = "".join(
        f'<polyline fill="none" stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="1.5" '
        f'points="{" ".join(place(x, y) for x, y in own)}"><title>{escape(name)}</title></polyline>'
        for i, (name, own) in enumerate(series.items())
    )
    return _figure(title, _axes(x_max, y_max, x_unit, y_unit) + curves)


def _axes(x_max: float, y_max: float, x_unit: str, y_unit: str) -> str:
    parts = []
    for i in range(5):
        share = i / 4
        x, y = LEFT + share * (WIDTH - LEFT - 16), HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#9ca3af" stroke-opacity=".35"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * y_max:g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{share * x_max:g}</text>')
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_unit)}</text>')
    middle = HEIGHT / 2
    parts.append(
        f'<text x="12" y="{middle}" transform="rotate(-90 12 {middle})" text-anchor="middle">{escape(y_unit)}</text>'
    )
    return "".join(parts)


def _timeline(outcomes: Sequence[Outcome]) -> str:
    """A bar for each request: light until the first token, then dark."""
    shown = sorted(outcomes, key=lambda outcome: outcome.start_time)
    shown = shown[:: max(1, math.ceil(len(shown) / MAX_BARS))]
    first = shown[0].start_time if shown else 0.0
    x_max = _round_up(max((outcome.start_time + outcome.latency - first for outcome in shown), default=1.0))
    scale, height = (WIDTH - LEFT - 16) / x_max, (HEIGHT - BOTTOM - TOP) / max(len(shown), 1)
    bars = []
    for i, outcome in enumerate(shown):
        y = TOP + i * height
        start = outcome.start_time - first
        parts = ((start, outcome.ttft, ".35"), (start + outcome.ttft, outcome.latency - outcome.ttft, "1"))
        bars += [
            f'<rect x="{LEFT + at * scale:.1f}" y="{y:.2f}" width="{seconds * scale:.1f}" '
            f'height="{height * 0.8:.2f}" fill="{COLOURS[0]}" fill-opacity="{opacity}"/>'
            for at, seconds, opacity in parts
        ]
    return _figure(
        "Requests of the last round: waiting, then answering", _axes(x_max, len(shown), "s", "") + "".join(bars)
    )


def _figure(title: str, content: str) -> str:
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{content}</svg>'
    return f"<figure><h2>{escape(title)}</h2>{svg}</figure>"


def _shares(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """The cumulative distribution in ms and percent."""
    ordered = sorted(seconds)
    step = max(1, len(ordered) // MAX_POINTS)
    kept = sorted({*range(0, len(ordered), step), len(ordered) - 1}) if ordered else []
    return [(1000 * ordered[i], 100 * (i + 1) / len(ordered)) for i in kept]


def _points(values: Sequence[float]) -> list[tuple[float, float]]:
    """The points of a step curve: a value holds for its second."""
    step = max(1, len(values) // MAX_POINTS)
    return [(float(i + end), float(values[i])) for i in range(0, len(values), step) for end in (0, step)]


def _round_up(value: float) -> float:
    """The next 1, 2, 4 or 8 times a power of ten: axes end there."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((factor * power for factor in (1, 2, 4, 8) if value <= factor * power), 10 * power)
