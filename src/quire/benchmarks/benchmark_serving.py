"""`python -m quire.benchmarks.benchmark_serving`, as the guides start it: `quire bench serve`."""

from __future__ import annotations

from quire.benchmarks import run

if __name__ == "__main__":
    run("benchmark_serving", "serve")
