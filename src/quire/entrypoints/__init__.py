"""Module paths of vLLM's guides under our package's name."""
