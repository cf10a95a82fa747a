"""Bytes from a signed URL are in memory, and any other answer is only counted: others read the rest."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quire.loader import signed_reads
from quire.loader.signed_reads import MAX_FAILURES, SignedReads
from tests.loader.local_store import Store

DATA = random.Random(0).randbytes(500_000)  # more than a connection buffers
NAME = "model.safetensors"


class Reads(SignedReads):
    """Of DATA in a store.

    Attributes:
        num_signed: how often a URL was made.
    """

    def __init__(self, store: Store, etag: str | None = None) -> None:
        super().__init__(self._sign_next, len(DATA), etag or f'"{store.etag(NAME)}"')
        self.store, self.num_signed = store, 0

    def _sign_next(self, seconds: float) -> str:
        self.num_signed += 1
        return f"{self.store.url}/models/{NAME}?signature={self.num_signed}"

    def check(self, begin: int, *sizes: int) -> int:
        """Read these numbers of bytes into buffers, check the bytes that came, and tell how many came."""
        buffers = [np.zeros(size, dtype=np.uint8) for size in sizes]
        came = self.fill(buffers, begin)
        assert b"".join(buffers)[:came] == DATA[begin : begin + came]
        return came


@pytest.fixture(params=["http", "https"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, pems: tuple[Path, Path]) -> Iterator[Store]:
    monkeypatch.setenv("SSL_CERT_FILE", str(pems[0]))
    with Store({NAME: DATA}, pems if request.param == "https" else None) as store:
        yield store
        store.is_left.set()


@pytest.fixture
def reads(store: Store) -> Iterator[Reads]:
    reads = Reads(store)
    yield reads
    reads.close()


def test_parts_of_any_size(store: Store, reads: Reads) -> None:
    assert reads.check(0) == 0
    assert not store.reads, "nothing is asked for"
    assert reads.check(0, len(DATA)) == len(DATA)
    assert reads.check(17, 1, 99, 10_000, 101, 100_000) == 110_201
    assert reads.check(len(DATA) - 1, 1) == 1
    assert reads.num_signed == 1
    assert store.num_connections == 1


def test_readers_share_connections(store: Store, reads: Reads) -> None:
    with ThreadPoolExecutor(4) as pool:
        parts = range(0, len(DATA), 10_000)
        assert sum(pool.map(lambda begin: reads.check(begin, 6_000, 4_000), parts)) == len(DATA)
    assert store.num_connections <= 4


@pytest.mark.parametrize("fault", ["200", "403", "503", "short", "endless", "changed", "another", "range", "redirect"])
def test_no_byte_of_another_answer(store: Store, reads: Reads, fault: str) -> None:
    store.faults[NAME] = lambda number: fault if number == 0 else None
    assert reads.check(10, 1000) == 0
    assert reads.check(10, 1000) == 1000
    assert reads.num_signed == 2, "the URL may have ended"
    assert len(store.reads) == 2, "a redirect is not followed"


def test_an_answer_for_the_whole_object(store: Store, reads: Reads) -> None:
    """A server that does not know ranges."""
    store.knows_ranges = False
    assert reads.check(0, len(DATA)) == 0


def test_a_cut_answer_counts_until_it_was_cut(store: Store, reads: Reads) -> None:
    store.faults[NAME] = lambda number: "cut"
    assert reads.check(10, 150_000, 250_000) == 200_000


@pytest.mark.parametrize("size", [10, 10_000, 100_000])
def test_a_body_that_comes_with_its_head(store: Store, reads: Reads, size: int) -> None:
    store.faults[NAME] = lambda number: "together"
    for begin in (0, 1000):
        assert reads.check(begin, 5, size - 5) == size


def test_a_server_that_ends_each_connection(store: Store, reads: Reads) -> None:
    store.faults[NAME] = lambda number: "last"
    assert reads.check(0, len(DATA)) + reads.check(10, 20) == len(DATA) + 20
    assert store.num_connections == 2


def test_a_reader_whose_bytes_have_not_come_holds_up_nobody(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_reads, "NUM_TURNS", 1)
    store.faults[NAME] = lambda number: "slow" if number == 0 else None
    reads = Reads(store)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(reads.check, 0, len(DATA))
        assert store.is_waiting.wait(10)
        assert reads.check(0, len(DATA)) == len(DATA)
        assert not slow.done()
        store.is_left.set()
        assert slow.result() == 1
    reads.close()


def test_a_certificate_that_nobody_trusts(monkeypatch: pytest.MonkeyPatch, pems: tuple[Path, Path]) -> None:
    with Store({NAME: DATA}, pems) as store:
        reads = Reads(store)
        assert reads.check(0, 10) == 0
        assert not store.reads
        monkeypatch.setenv("SSL_CERT_FILE", str(pems[0]))
        reads = Reads(store)
        assert reads.check(0, 10) == 10
        reads.close()


def test_a_version_without_an_etag(store: Store) -> None:
    store.has_etags = False
    reads = Reads(store)
    assert reads.check(0, 10) == 0, "it had one"
    reads._etag = None
    assert reads.check(0, 10) == 10
    reads.close()


@pytest.mark.parametrize("limit", ["WAIT_SECONDS", "PART_SECONDS"])
def test_a_slow_answer_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(signed_reads, limit, 0.05 if limit == "WAIT_SECONDS" else -1.0)
    store.faults[NAME] = lambda number: "slow" if limit == "WAIT_SECONDS" else None
    reads = Reads(store)
    start = time.monotonic()
    assert reads.check(0, 300_000) < 300_000
    assert time.monotonic() - start < 5
    reads.close()


def test_a_url_is_signed_again_in_time(store: Store, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_reads, "SIGNED_SECONDS", 0.0)
    assert reads.check(0, 10) + reads.check(0, 10) == 20
    assert reads.num_signed == 2


def test_it_is_given_up_when_it_only_fails(store: Store, reads: Reads, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, signed_reads.logger.name)
    store.faults[NAME] = lambda number: None if number == MAX_FAILURES - 1 else "403"
    for _ in range(2 * MAX_FAILURES + 5):
        reads.check(0, 10)
    assert len(store.reads) == 2 * MAX_FAILURES, "one that came begins the count anew"
    assert "signed URLs fail (HTTPException: (403, " in caplog.text
    assert "signature=" not in caplog.text


def test_a_store_that_cannot_sign(store: Store) -> None:
    asked: list[float] = []

    def sign(seconds: float) -> str:
        asked.append(seconds)
        raise NotImplementedError

    reads = SignedReads(sign, len(DATA), None)
    for _ in range(3):
        assert reads.fill([np.zeros(10, dtype=np.uint8)], 0) == 0
    assert len(asked) == 1


def test_no_server() -> None:
    reads = SignedReads(lambda seconds: "http://127.0.0.1:1/models/a?signature=1", len(DATA), None)
    assert reads.fill([np.zeros(10, dtype=np.uint8)], 0) == 0


def test_a_connection_ends_with_its_part_after_the_last(store: Store, reads: Reads) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def waits(number: int) -> None:
        reached.set()
        go_on.wait(10)

    store.faults[NAME] = waits
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(reads.check, 0, 10)
        assert reached.wait(10)
        reads.close()
        go_on.set()
        assert came.result() == 10
    assert not reads._idle
