"""Stands in for workers: adapters are texts by path, and reading one takes some looks."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import AdapterChangedError, AdapterError, QuireError
from quire.lora.facts import AdapterFacts


def digest_of(content: str) -> str:
    return f"digest of {content}"


@dataclass
class Reading:
    """A Polled that is done after this number of looks. Only the oldest is looked at."""

    shelf: Shelf
    path: str
    digest: str | None
    num_looks: int

    def done(self) -> bool:
        assert self.shelf.readings[0] is self
        self.num_looks -= 1
        return self.num_looks < 0

    def result(self) -> AdapterFacts:
        assert self.shelf.readings.pop(0) is self
        if self.path in self.shelf.failures:
            raise self.shelf.failures[self.path]
        content = self.shelf.contents.get(self.path)
        digest = None if content is None else digest_of(content)
        if self.digest not in (None, digest):
            raise AdapterChangedError("The adapter's files changed after it was loaded")
        if digest is None:
            raise AdapterError("There is no adapter at this path", value=self.path)
        self.shelf.in_memory.add(digest)
        self.shelf.num_loads += 1
        self.shelf.check_room()
        return AdapterFacts(digest, 8, 1000, 7)


class Shelf:
    """A registry.AdapterMemory with room for `most` adapters."""

    def __init__(self, most: int, contents: dict[str, str] | None = None, num_looks: int = 2) -> None:
        self.most, self.num_looks = most, num_looks
        self.contents = contents or {}  # by path
        self.failures: dict[str, QuireError | Exception] = {}  # by path
        self.in_memory: set[str] = set()
        self.readings: list[Reading] = []
        self.awaited: list[bool] = []  # of each load
        self.num_loads = self.most_readings = 0

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> Reading:
        self.awaited.append(is_awaited)
        self.readings.append(Reading(self, path, digest, self.num_looks))
        self.most_readings = max(self.most_readings, len(self.readings))
        self.check_room()
        return self.readings[-1]

    def check_room(self) -> None:
        """What is being read takes memory too."""
        assert len(self.in_memory) + len(self.readings) <= self.most + 1, "more than memory was planned for"

    def drop_adapter(self, digest: str) -> None:
        self.in_memory.remove(digest)
