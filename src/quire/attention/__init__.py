"""Attention over the paged KV cache: the layer, the contract of a backend, and the backends."""
