"""Runs batches on one device: persistent rows, the KV cache's memory, the forward pass and sampling."""
