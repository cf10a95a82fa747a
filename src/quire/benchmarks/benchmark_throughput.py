"""`python -m quire.benchmarks.benchmark_throughput`, as the guides start it: `quire bench throughput`."""

from __future__ import annotations

from quire.benchmarks import run

if __name__ == "__main__":
    run("benchmark_throughput", "throughput")
