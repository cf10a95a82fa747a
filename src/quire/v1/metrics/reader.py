"""vLLM's path of the classes that LLM.get_metrics() returns."""

from quire.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
