"""vLLM's folder of metrics."""
