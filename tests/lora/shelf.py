"""Stands in for workers: adapters are texts by path, and reading one takes some looks."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import AdapterChangedError, AdapterError, QuireError
from quire.lora.facts import AdapterFacts


def digest_of(content: str) -> str:
    return f"digest of {content}"


@dataclass
class Reading:
    """A Polled that is done after this number of looks."""

    shelf: Shelf
    path: str
    digest: str | None
    num_looks: int

    def done(self) -> bool:
        self.num_looks -= 1
        return self.num_looks < 0

    def result(self) -> AdapterFacts:
        self.shelf.num_readings -= 1
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
        assert len(self.shelf.in_memory) <= self.shelf.most + 1, "more than one beyond what memory was planned for"
        return AdapterFacts(digest, 8, 1000, 7)


class Shelf:
    """A registry.AdapterMemory with room for `most` adapters."""

    def __init__(self, most: int, contents: dict[str, str] | None = None, num_looks: int = 2) -> None:
        self.most, self.num_looks = most, num_looks
        self.contents = contents or {}  # by path
        self.failures: dict[str, QuireError | Exception] = {}  # by path
        self.in_memory: set[str] = set()
        self.num_readings = self.num_loads = 0

    def load_adapter(self, path: str, digest: str | None) -> Reading:
        self.num_readings += 1
        assert self.num_readings == 1, "several adapters are read at once"
        return Reading(self, path, digest, self.num_looks)

    def drop_adapter(self, digest: str) -> None:
        self.in_memory.remove(digest)
