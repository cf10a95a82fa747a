"""Models: one declaration per family over a shared decoder, and the registry that finds it."""
