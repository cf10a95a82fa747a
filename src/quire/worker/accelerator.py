"""The worker's interface to a device beside tensors: asynchronous copies, graphs, time and memory.

`Host` is the CPU, on which all work is done when the call returns, and `Cuda` a GPU. Tests have one that works on CPU
tensors and delays the work that a GPU may delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.errors import EngineDeadError

_cuda: Any = torch.cuda  # without types in some versions of torch


def device_failed(error: BaseException) -> EngineDeadError:
    """Raised when a kernel has failed: CUDA does no more work in this process, so another one is started."""
    return EngineDeadError(f"The GPU reports an error: {str(error).splitlines()[0]}")


class Event(Protocol):
    """A point in the device's work, which it will have passed."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Download(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> Iterator[Tensor]:
        """The tensors on the host, in the order given. Call it once. Raises EngineDeadError if the device has
        failed.
        """
        ...


class Graph(Protocol):
    """Launches that were captured with their addresses."""

    def replay(self) -> None: ...


class Device(Protocol):
    """A step's interface to any device. Work is done in the order of the calls."""

    runs_ahead: bool  # work goes on after the call that asks for it

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start to copy tensors to the host beside later work, which must not change them."""
        ...

    def mark(self) -> Any:
        """A point between the work before and the work after this call."""
        ...

    def seconds_between(self, start: Any, end: Any) -> float:
        """The device's time between two marks, which it has passed."""
        ...

    def synchronize(self) -> None:
        """Wait for everything. Raises EngineDeadError if the device has failed."""
        ...


class Host:
    """The CPU: work is done when the call returns."""

    runs_ahead = False

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return _OnHost(tensors)

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        """Everything is done already."""


class _OnHost:
    """Tensors that are where they are wanted."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> Iterator[Tensor]:
        return iter(self._tensors)


class Accelerator(Device, Protocol):
    """A GPU. Downloads do not hold up later work."""

    device: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory (uint8) that the device can copy from by itself."""
        ...

    def upload(self, host: Tensor, target: Tensor) -> Event:
        """Start to copy pinned memory to the device. Until the event, the host must not change it."""
        ...

    def graph_pool(self) -> Any:
        """Scratch memory for graphs that never run at the same time."""
        ...

    def capture(self, run: Callable[[], None], pool: Any) -> Graph:
        """What `run` launches, without computing it."""
        ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device, other processes seen too."""
        ...

    def reserved_peak(self) -> int:
        """Most bytes that this process' allocator has held since `release`."""
        ...

    def release(self) -> int:
        """Give back the allocator's unused memory. Returns the bytes that it still holds."""
        ...


class Cuda:
    """The GPU that torch counts first."""

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
            # The wait sleeps instead of spinning: other threads need the core.
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

    def synchronize(self) -> None:
        try:
            _cuda.synchronize(self.device)
        except torch.AcceleratorError as error:
            raise device_failed(error) from error


class _CudaDownload:
    def __init__(self, copied: Event, on_host: list[Tensor], sources: Sequence[Tensor]) -> None:
        self._copied, self._on_host = copied, on_host
        self._sources: Sequence[Tensor] = sources  # their memory must not be given to others before it is copied

    def wait(self) -> Iterator[Tensor]:
        try:
            self._copied.synchronize()
        except torch.AcceleratorError as error:
            raise device_failed(error) from error
        self._sources = ()
        return iter(self._on_host)
