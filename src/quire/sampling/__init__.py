"""Sampling: from logits to tokens, each row a function of its own logits, parameters, seed and output length."""
