"""Decode and prefill at 8k tokens of context, compared with 256 and 512 tokens, from times of engines that took turns.

The times come from a comparison of running engines, as JSON: {"seconds": {engine: {case: [seconds of each round]}}}.
The first engine is compared with the others. A case is named PROMPTSxINPUTxOUTPUT. The cases are

    1x256x1,1x256x65,1x512x1,1x8000x1,1x8000x65

The rate of decoding comes from the time of 64 further tokens. The rate of prefill is the number of input tokens divided
by the time of a case with one output token. The last line of each engine gives the change of the ratio from short to
long contexts: with 1 or more, Quire is "no worse at 8k".

    python benchmarks/peers/long_context.py TIMINGS.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

SHORT, LONG, SHORT_PREFILL, NUM_DECODED = 256, 8000, 512, 64
Timings = dict[str, Sequence[float]]  # seconds of each round, by case


def decode_rates(timings: Timings, context: int) -> list[float]:
    """Tokens per second of each round."""
    pairs = zip(timings[f"1x{context}x1"], timings[f"1x{context}x{1 + NUM_DECODED}"], strict=True)
    return [NUM_DECODED / (whole - prefill) for prefill, whole in pairs]


def prefill_rates(timings: Timings, length: int) -> list[float]:
    """Prompt tokens per second of each round."""
    return [length / seconds for seconds in timings[f"1x{length}x1"]]


def rates(timings: Timings) -> dict[str, list[float]]:
    return {
        f"decode at {SHORT}": decode_rates(timings, SHORT),
        f"decode at {LONG}": decode_rates(timings, LONG),
        f"prefill of {SHORT_PREFILL}": prefill_rates(timings, SHORT_PREFILL),
        f"prefill of {LONG}": prefill_rates(timings, LONG),
    }


def table(seconds: dict[str, Timings]) -> str:
    """Tokens per second by engine, and the medians of the rounds' ratios."""
    engines = list(seconds)
    by_engine = {engine: rates(seconds[engine]) for engine in engines}
    ours = by_engine[engines[0]]
    head = [*(f"{engine}, tokens/s" for engine in engines), *(f"{engines[0]} / {engine}" for engine in engines[1:])]
    lines = ["| | " + " | ".join(head) + " |", "|" + "---|" * (len(head) + 1)]
    ratio: dict[tuple[str, str], float] = {}
    for what in ours:
        cells = [f"{statistics.median(by_engine[engine][what]):.1f}" for engine in engines]
        for engine in engines[1:]:
            pairs = zip(ours[what], by_engine[engine][what], strict=True)
            ratio[engine, what] = statistics.median(a / b for a, b in pairs)
            cells.append(f"{ratio[engine, what]:.2f}x")
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    lines.append("")
    for engine in engines[1:]:
        decode = ratio[engine, f"decode at {LONG}"] / ratio[engine, f"decode at {SHORT}"]
        prefill = ratio[engine, f"prefill of {LONG}"] / ratio[engine, f"prefill of {SHORT_PREFILL}"]
        lines.append(f"Ratio to {engine}, long over short: decode {decode:.2f}, prefill {prefill:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timings", type=Path, help="JSON")
    seconds: dict[str, Timings] = json.loads(parser.parse_args().timings.read_text(encoding="utf-8"))["seconds"]
    print(table(seconds))


if __name__ == "__main__":
    main()
