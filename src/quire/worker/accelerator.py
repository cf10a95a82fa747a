"""The worker's interface to a device, apart from tensors: asynchronous copies, graphs, time and memory.

`Host` is the CPU, which has done all work when a call returns. `Cuda` is a GPU. Tests have an accelerator that computes
with CPU tensors and delays the work that a GPU may delay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from quire.errors import EngineDeadError

# Without types in some versions of torch.
_cuda: Any = torch.cuda
_distributed: Any = torch.distributed


def device_failed(error: BaseException) -> EngineDeadError:
    """The error for a failed kernel. CUDA does no more work in this process, so the front end starts another one."""
    return EngineDeadError(f"The GPU reports an error: {str(error).splitlines()[0]}")


class Event(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Wait until the device has passed this point."""
        ...


class Download(Protocol):
    """Tensors on their way to the host."""

    def is_done(self) -> bool:
        """Whether `wait` returns at once, or raises at once because the device has failed."""
        ...

    def wait(self) -> Iterator[Tensor]:
        """Wait for the tensors. They come in the order in which they were given. Call it only once.

        Raises:
            EngineDeadError: the device has failed.
        """
        ...


class Graph(Protocol):
    """Kernel launches that were captured together with their addresses."""

    def replay(self) -> None:
        """Launch all of them again, without waiting."""
        ...


class Device(Protocol):
    """The interface of a step to any device. The device works in the order of the calls."""

    runs_ahead: bool  # whether a call may return before its work is done

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start to copy tensors to the host. Later work goes on beside the copy, and must not change the tensors."""
        ...

    def mark(self) -> Any:
        """A point between the work before and the work after this call."""
        ...

    def seconds_between(self, start: Any, end: Any) -> float:
        """The device's time between two marks. The device must have passed both."""
        ...

    def synchronize(self) -> None:
        """Wait for all work. Raises EngineDeadError if the device has failed."""
        ...


class Host:
    """The CPU as a Device: work is done when the call returns."""

    runs_ahead = False

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return _OnHost(tensors)

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        """Return at once: all work is done already."""


class _OnHost:
    """A Download of tensors that are on the host already."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def is_done(self) -> bool:
        return True

    def wait(self) -> Iterator[Tensor]:
        return iter(self._tensors)


class Accelerator(Device, Protocol):
    """The interface to a GPU. Downloads do not hold up later work."""

    device: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory (uint8) that the device can copy from by itself."""
        ...

    def upload(self, host: Tensor, target: Tensor) -> Event:
        """Start to copy pinned memory to the device. The host must not change it before the event has passed."""
        ...

    def graph_pool(self) -> Any:
        """Scratch memory for graphs that never run at the same time."""
        ...

    def capture(self, run: Callable[[], None], pool: Any) -> Graph:
        """Capture the kernels that `run` launches. They are not computed now."""
        ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device's memory. Memory of other processes is not free."""
        ...

    def reserved_peak(self) -> int:
        """The most bytes that the allocator of this process has held since `release`."""
        ...

    def connect(self, store: Any, rank: int, size: int, limit: timedelta) -> Any:
        """Connect some ranks, which all call this. Returns a backend of torch.distributed.

        Args:
            store: a store of torch.distributed, where the ranks find each other.
            limit: the time after which the backend may end the process, because another rank has not come.
        """
        ...

    def check(self) -> None:
        """Raise EngineDeadError if the device has failed, without waiting. Any thread may call it, but for captures."""
        ...

    def release(self) -> int:
        """Give back the allocator's unused memory. Returns the bytes that it still holds."""
        ...


class Cuda:
    """The Accelerator for the GPU that torch counts first."""

    runs_ahead = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        _cuda.set_device(self.device)
        self._copies = _cuda.Stream(self.device)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: Tensor, target: Tensor) -> Event:
        target.copy_(host, non_blocking=True)
        copied = _cuda.Event()
        copied.record()
        event: Event = copied
        return event

    def download(self, tensors: Sequence[Tensor]) -> Download:
        computed = _cuda.Event()
        computed.record()
        self._copies.wait_event(computed)
        with _cuda.stream(self._copies):
            on_host = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
            for host, tensor in zip(on_host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            # A blocking event sleeps while it waits, because other threads need the core.
            copied = _cuda.Event(blocking=True)
            copied.record()
        return _CudaDownload(copied, on_host, tensors)

    def graph_pool(self) -> Any:
        return _cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], pool: Any) -> Graph:
        graph: Graph = _cuda.CUDAGraph()
        with _cuda.graph(graph, pool=pool):
            run()
        return graph

    def mark(self) -> Any:
        event = _cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000

    def memory(self) -> tuple[int, int]:
        free, total = _cuda.mem_get_info(self.device)
        return int(free), int(total)

    def reserved_peak(self) -> int:
        return int(_cuda.max_memory_reserved(self.device))

    def release(self) -> int:
        _cuda.synchronize(self.device)
        _cuda.empty_cache()
        _cuda.reset_peak_memory_stats(self.device)
        return int(_cuda.memory_reserved(self.device))

    def connect(self, store: Any, rank: int, size: int, limit: timedelta) -> Any:
        # Ranks of one machine talk over its own interface. Tensors go over NVLink, PCIe or shared memory.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        options = _distributed.ProcessGroupNCCL.Options()
        options._timeout = limit
        return _distributed.ProcessGroupNCCL(store, rank, size, options)

    def check(self) -> None:
        try:
            _cuda.current_stream(self.device).query()
        except torch.AcceleratorError as error:
            raise device_failed(error) from error

    def synchronize(self) -> None:
        try:
            _cuda.synchronize(self.device)
        except torch.AcceleratorError as error:
            raise device_failed(error) from error


class _CudaDownload:
    def __init__(self, copied: Any, on_host: list[Tensor], sources: Sequence[Tensor]) -> None:
        self._copied, self._on_host = copied, on_host
        self._sources: Sequence[Tensor] = sources  # kept so that their memory is not used again before it is copied

    def is_done(self) -> bool:
        try:
            return bool(self._copied.query())
        except torch.AcceleratorError:
            return True

    def wait(self) -> Iterator[Tensor]:
        try:
            self._copied.synchronize()
        except torch.AcceleratorError as error:
            raise device_failed(error) from error
        self._sources = ()
        return iter(self._on_host)
