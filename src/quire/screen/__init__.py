"""Text for people: the first screen, progress, and the answer of `quire explain`."""
