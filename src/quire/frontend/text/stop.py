"""Stop strings as one automaton (Aho and Corasick 1975): constant work per character for all strings and cuts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """A compiled set of stop strings, which can be shared.

    State 0 is the root. The state after some text stands for the longest suffix of the text that begins a stop string.
    `depth` is the length of this suffix: exactly this text must be held back.
    """

    __slots__ = ("children", "depth", "ends", "fail")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]
        self.ends: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.children[state]:
                self.children[state][char] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.fail.append(0)
                self.ends.append(None)
            state = self.children[state][char]
        self.ends[state] = stop

    def _link(self) -> None:
        """Link breadth first: a state's failure state is less deep, so it is complete when it is needed."""
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            if self.ends[state] is None:
                self.ends[state] = self.ends[self.fail[state]]
            for char, child in self.children[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        children, fail = self.children, self.fail
        while char not in children[state]:
            if state == 0:
                return 0
            state = fail[state]
        return children[state][char]


@lru_cache(maxsize=256)
def compile_stops(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these strings. Requests of one client usually have the same strings."""
    return StopStrings(stops)


class StopMatcher:
    """Finds the first complete stop string. No character of a possible stop string is let out.

    If two end at the same character, the longer one counts. The result does not depend on the cut of the text.
    """

    __slots__ = ("_held", "_include", "_state", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = compile_stops(tuple(stops))
        self._include = include  # keep the stop string in the text
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Add text. Returns the text that is final now. After `matched` is set, no further push is allowed.

        Args:
            armed: False ignores matches that end in this text (before min_tokens).
        """
        assert self.matched is None, "text after the stop string"
        stops, state, held = self._stops, self._state, self._held
        step, ends, firsts = stops.step, stops.ends, stops.children[0]
        for position, char in enumerate(text):
            if not state and char not in firsts:
                continue
            state = step(state, char)
            if armed and (stop := ends[state]) is not None:
                end = len(held) + position + 1
                self.matched, self._held = stop, ""
                return (held + text)[: end if self._include else end - len(stop)]
        self._state = state
        if self._include:
            return text
        known = held + text
        cut = len(known) - stops.depth[state]
        self._held = known[cut:]
        return known[:cut]

    def flush(self) -> str:
        """The rest of the text at the end of the output."""
        held, self._held = self._held, ""
        return held
