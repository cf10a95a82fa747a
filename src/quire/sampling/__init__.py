"""Sampling: from logits to tokens. Each row depends on its own logits, parameters, seed and output length only."""
