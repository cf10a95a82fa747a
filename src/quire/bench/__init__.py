"""The benchmark suite behind `quire bench`: workloads, arrivals, the load, statistics, reports, comparisons."""
