"""Formats of weights and of the KV cache, and their bytes. No torch."""
