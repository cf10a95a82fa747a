"""Incremental text from token ids: bytes, incomplete UTF-8, stop strings. Pure state machines."""
