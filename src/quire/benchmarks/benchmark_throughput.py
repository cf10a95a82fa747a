"""`python -m quire.benchmarks.benchmark_throughput`: refused with the command that takes its place."""

from __future__ import annotations

from quire.benchmarks import refuse

if __name__ == "__main__":
    refuse("benchmark_throughput", "quire bench throughput")
