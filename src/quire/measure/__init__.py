"""Measures servers and the engine: the commands of `quire bench`."""
