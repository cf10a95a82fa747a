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


def test_a_load_that_fails_drops_nothing() -> None:
    """Several are queued, and the memory is full."""
    shelf = Shelf(3, {"/d": "d", "/e": "e", "/f": "f", "/g": "g"})
    registry, requests = AdapterRegistry(shelf, 3), Requests()
    for operation, path in enumerate(("/d", "/e", "/f")):
        registry.load(LoadAdapter(operation, path))
    while registry.is_busy:
        registry.step(requests)
    kept = set(shelf.in_memory)
    assert len(kept) == 3
    for operation in range(4):
        registry.load(LoadAdapter(10 + operation, "/wrong"))
    while registry.is_busy:
        registry.step(requests)
        assert shelf.in_memory == kept
    registry.load(LoadAdapter(20, "/g"))
    while registry.is_busy:
        registry.step(requests)
    assert shelf.in_memory == {E, digest_of("f"), digest_of("g")}, "the one used the longest time ago makes room"


def test_what_requests_wait_for() -> None:
    """Adapters of waiting requests, and new ones that a request names."""
    shelf = Shelf(4, {f"/{name}": name for name in "abde"})
    registry, requests = AdapterRegistry(shelf, 4), Requests(wanted=[D])
    registry.load(LoadAdapter(0, "/d", D))
    registry.load(LoadAdapter(1, "/a"))
    registry.load(LoadAdapter(2, "/b", is_awaited=True))
    registry.step(requests)
    assert shelf.awaited == [False, True, True]  # /a, /d, /b


def test_loads_and_requests_that_exchange_adapters_all_the_time_take_turns() -> None:
    contents = {f"/{name}": name for name in "defghijk"}
    shelf = Shelf(2, contents)
    registry, requests = AdapterRegistry(shelf, 2), Requests()
    for operation, (path, content) in enumerate(contents.items()):
        registry.load(LoadAdapter(operation, path, digest_of(content)))
    registry.load(LoadAdapter(99, "/d"))
    digests, states = [digest_of(content) for content in contents.values()], []
    for step in range(40):
        requests.wanted = [digests[step % 8], digests[(step + 3) % 8]]
        registry.step(requests)
        states += [state.operation for state in registry.take_states()]
    assert 99 in states
    assert len(states) > 4, "requests were read for too"
