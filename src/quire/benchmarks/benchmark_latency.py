"""`python -m quire.benchmarks.benchmark_latency`, as the guides start it: `quire bench latency`."""

from __future__ import annotations

from quire.benchmarks import run

if __name__ == "__main__":
    run("benchmark_latency", "latency")
