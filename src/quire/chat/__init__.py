"""A chat in the terminal: what was said, what a person types, and who answers (an engine of its own, or a server)."""
