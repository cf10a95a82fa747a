"""What is in memory when reads overlap with the life of requests, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.lora.registry import AdapterRegistry
from quire.messages import LoadAdapter, UnloadAdapter
from tests.lora.shelf import Shelf, digest_of

D, E = digest_of("d"), digest_of("e")


@dataclass
class Requests:
    """Those that have adapters, by digest."""

    running: list[str] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)

    def __contains__(self, digest: str) -> bool:
        return digest in self.running or digest in self.wanted

    def has_preempted(self, digest: str) -> bool:
        return digest in self.preempted


def test_what_is_read_finds_no_room() -> None:
    """A running request has the only place by then, and a preempted one keeps what is read though it is unloaded."""
    shelf = Shelf(1, {"/d": "d", "/e": "e"})
    registry = AdapterRegistry(shelf, 1)
    for operation, (path, digest) in enumerate((("/d", D), ("/e", E))):
        registry.load(LoadAdapter(operation, path, digest))
    requests = Requests(wanted=[E])
    while not registry.is_in_memory(E):
        registry.step(requests)
    requests.wanted, requests.preempted = [D], {D}
    registry.step(requests)
    requests.running = [E]
    registry.unload(UnloadAdapter(D, "/d"))
    for _ in range(4):
        registry.step(requests)
    assert shelf.in_memory == {E}
    requests.running = []
    while not registry.is_in_memory(D):
        registry.step(requests)
    assert shelf.in_memory == {D}
