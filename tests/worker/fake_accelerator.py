"""An accelerator on CPU tensors that delays like a GPU, and notices faults that a GPU would not report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.worker_thread import WorkerThread
from quire.worker.input_batch import StagedStep

GARBAGE = 0xAB  # what lies in host memory before a copy has come


class FakeEvent:
    """The end of an upload: until it was waited for, the host's memory may not change."""

    def __init__(self, host: Tensor) -> None:
        self.host, self.copied = host, host.clone()
        self.is_over = False

    def synchronize(self) -> None:
        assert torch.equal(self.host, self.copied), "pinned memory was changed while it was being copied"
        self.is_over = True


class FakeDownload:
    """Copied at once, or as late as possible: both are allowed, so both must give the same."""

    def __init__(self, tensors: Sequence[Tensor], *, is_late: bool) -> None:
        self._sources = [tensor if is_late else tensor.clone() for tensor in tensors]
        self.num_waits = 0

    def is_done(self) -> bool:
        return True

    def wait(self) -> Iterator[Tensor]:
        self.num_waits += 1
        assert self.num_waits == 1, "waited for twice"
        return iter([source.clone() for source in self._sources])


class FakeGraph:
    """Runs what was captured, on what lies where it lay."""

    def __init__(self, run: Callable[[], None], pool: object) -> None:
        self.pool = pool
        self.num_replays = 0
        self._run, self._addresses = run, _addresses(run)

    def replay(self) -> None:
        assert _addresses(self._run) == self._addresses, "what the graph reads has moved"
        self.num_replays += 1
        self._run()


def _addresses(run: Callable[[], None]) -> list[int]:
    """Of the arrays of a step among the arguments."""
    assert isinstance(run, partial)
    staged = next(argument for argument in run.args if isinstance(argument, StagedStep))
    return [value.data_ptr() for name in StagedStep.__slots__ if isinstance(value := getattr(staged, name), Tensor)]


# Groups with an operation that will not end. Destroying one waits for the limit of time of Gloo, in any later test.
_LEFT: list[dist.ProcessGroupGloo] = []


class FakeTransport:
    """Gloo in the place of NCCL. As with NCCL, the first operation connects, and `abort` ends those that wait.

    A sender waits for its receiver, as NCCL may do with any message, and does with a long one.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._groups: dict[tuple[int, ...], dist.ProcessGroupGloo] = {}  # by members
        self._aborted: Future[None] = Future()
        self._thread = WorkerThread(f"fake transport {rank}")

    def _allgather_base(self, output: Tensor, own: Tensor) -> FakeWork:
        return self._begin(self._gather, tuple(range(self._size)), output, own)

    def alltoall_base(self, output: Tensor, given: Tensor, out_sizes: list[int], sizes: list[int]) -> FakeWork:
        return self._begin(self._to_all, output, given, out_sizes, sizes)

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> FakeWork:
        return self._begin(self._pass_on, receiver, *tensors, True)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> FakeWork:
        return self._begin(self._pass_on, sender, *tensors, False)

    def _begin(self, work: Callable[..., None], *arguments: Any) -> FakeWork:
        return FakeWork(self._thread.submit(work, *arguments), self._aborted)

    @torch.inference_mode()
    def _gather(self, members: tuple[int, ...], output: Tensor, own: Tensor) -> None:
        if members not in self._groups:
            store, size = dist.PrefixStore(str(members), self._store), len(members)
            limit = timedelta(seconds=20)
            self._groups[members] = dist.ProcessGroupGloo(store, members.index(self._rank), size, limit)
        work, ended = self._groups[members]._allgather_base(output, own), Future[None]()
        work.get_future().add_done_callback(lambda _: ended.set_result(None))
        wait((ended, self._aborted), return_when=FIRST_COMPLETED)
        if not ended.done():
            _LEFT.append(self._groups[members])
            return
        work.wait()

    @torch.inference_mode()
    def _to_all(self, output: Tensor, given: Tensor, out_sizes: list[int], sizes: list[int]) -> None:
        """All ranks give the same number of entries."""
        members, all_sizes = tuple(range(self._size)), torch.empty((self._size, self._size), dtype=torch.int64)
        everything = output.new_empty((self._size, *given.shape))
        self._gather(members, all_sizes, torch.tensor([sizes]))
        self._gather(members, everything.view(-1, *given.shape[1:]), given)
        if self._aborted.done():
            return
        parts = [
            entries.split_with_sizes(row)[self._rank]
            for entries, row in zip(everything, all_sizes.tolist(), strict=True)
        ]
        assert [len(part) for part in parts] == out_sizes, "ranks expect other numbers of entries"
        output.copy_(torch.cat(parts))

    @torch.inference_mode()
    def _pass_on(self, other: int, rows: Tensor, is_sender: bool) -> None:
        both = rows.new_empty((2 * len(rows), *rows.shape[1:]))
        low, high = sorted((self._rank, other))
        self._gather((low, high), both, rows)
        if not is_sender and not self._aborted.done():
            rows.copy_(both[: len(rows)] if other == low else both[len(rows) :])

    def abort(self) -> None:
        with suppress(InvalidStateError):  # it was aborted before
            self._aborted.set_result(None)


class FakeWork:
    """An operation of a FakeTransport."""

    def __init__(self, work: Future[None], aborted: Future[None]) -> None:
        self._work, self._aborted = work, aborted

    def wait(self) -> None:
        wait((self._work, self._aborted), return_when=FIRST_COMPLETED)
        if not self._aborted.done():
            self._work.result()


class FakeAccelerator:
    """See worker.accelerator.Accelerator.

    Args:
        is_late: downloads copy when they are waited for.
        free_bytes: the answers of `memory`, one after the other; the last one stays.
        peak_bytes: the answer of `reserved_peak`.
    """

    runs_ahead = True

    def __init__(
        self,
        *,
        is_late: bool = True,
        total_bytes: int = 1 << 30,
        free_bytes: Sequence[int] = (1 << 30,),
        peak_bytes: int = 0,
    ) -> None:
        self.device = torch.device("cpu")
        self.is_late = is_late
        self.graphs: list[FakeGraph] = []
        self.downloads: list[FakeDownload] = []
        self._uploads: dict[int, FakeEvent] = {}
        self._total_bytes, self._free_bytes, self._peak_bytes = total_bytes, list(free_bytes), peak_bytes

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)

    def upload(self, host: Tensor, target: Tensor) -> FakeEvent:
        last = self._uploads.get(host.data_ptr())
        assert last is None or last.is_over, "pinned memory was used again while it was being copied"
        target.fill_(GARBAGE)
        target.copy_(host)
        event = self._uploads[host.data_ptr()] = FakeEvent(host)
        return event

    def download(self, tensors: Sequence[Tensor]) -> FakeDownload:
        download = FakeDownload(tensors, is_late=self.is_late)
        self.downloads.append(download)
        return download

    def graph_pool(self) -> object:
        return object()

    def capture(self, run: Callable[[], None], pool: object) -> FakeGraph:
        graph = FakeGraph(run, pool)
        self.graphs.append(graph)
        return graph

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(end - start)

    def memory(self) -> tuple[int, int]:
        free = self._free_bytes.pop(0) if len(self._free_bytes) > 1 else self._free_bytes[0]
        return free, self._total_bytes

    def reserved_peak(self) -> int:
        return self._peak_bytes

    def connect(self, store: dist.Store, rank: int, size: int, limit: timedelta) -> FakeTransport:
        return FakeTransport(store, rank, size)

    def check(self) -> None:
        """It never fails."""

    def release(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Everything is done already."""

    @property
    def num_unread(self) -> int:
        """Downloads that nobody has waited for."""
        return sum(download.num_waits == 0 for download in self.downloads)
