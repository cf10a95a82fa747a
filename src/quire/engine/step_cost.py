"""How long a step should take, learnt from the steps before it: what tells a long prompt from an engine that hangs."""

from __future__ import annotations

NEWEST_WEIGHT = 0.5  # of the newest step in the mean of its size class


class StepCost:
    """Mean seconds of recent steps by size class, a class being the sizes between two powers of two.

    A size class without steps is judged by the next smaller one, in proportion to its tokens, or else by the next
    larger one. That is too much rather than too little, since a step reads all weights however small it is; it has to
    be right within the factor of 20 that a step may be late by.
    """

    def __init__(self) -> None:
        self._classes: dict[int, tuple[float, float]] = {}  # bit length of the tokens -> mean (tokens, seconds)

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        size = num_tokens.bit_length()
        tokens, mean = self._classes.get(size, (num_tokens, seconds))
        self._classes[size] = tokens + NEWEST_WEIGHT * (num_tokens - tokens), mean + NEWEST_WEIGHT * (seconds - mean)

    def predict(self, num_tokens: int) -> float:
        """Seconds of a step of so many tokens; 0 if nothing is known."""
        size = num_tokens.bit_length()
        smaller = [known for known in self._classes if known <= size]
        if smaller:
            tokens, seconds = self._classes[max(smaller)]
            return seconds * max(num_tokens / tokens, 1.0)
        return self._classes[min(self._classes)][1] if self._classes else 0.0
