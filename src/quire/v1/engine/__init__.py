"""vLLM's folder of engines."""
