"""An accelerator on CPU tensors that computes behind its host, as a GPU does: a thread does the work, in order.

While a step is launched, torch's functions and the compiled kernels are not called: they are queued, with memory for
their results that has no values yet. A host that reads too early reads garbage. After an error the device does nothing
any more, and whoever waits for it hears of the error. A graph is the list of the work that was queued while it was
captured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from quire.engine.worker_thread import WorkerThread
from quire.kernels import cpu
from quire.sampling import sampler
from quire.worker.accelerator import device_failed
from quire.worker.model_runner import ModelRunner
from tests.worker.fake_accelerator import FakeAccelerator, FakeTransport

Work = Callable[[], object]
OF_HOSTS = {"Gather", "Exchange"}  # kernels through which hosts meet
_shapes: dict[Hashable, Any] = {}  # see _kept_shapes_of
_launching = threading.local()  # `sink`: the function that takes the work which this thread launches


class QueuedAccelerator(FakeAccelerator):
    """A FakeAccelerator that computes behind its host: see run_ahead.

    Attributes:
        num_queued: the work that was ever queued.
        slow_seconds: the time for which the device sleeps before each copy to the host.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(is_late=False, **options)
        self.num_queued, self.slow_seconds = 0, 0.0
        self._error: BaseException | None = None
        self._thread = WorkerThread("fake device")

    def put(self, work: Work) -> Future[Any]:
        self.num_queued += 1
        return self._thread.submit(self._do, work)

    @torch.inference_mode()
    def _do(self, work: Work) -> Any:
        if self._error is None:
            try:
                return work()
            except BaseException as error:
                self._error = error
        return None

    def fail(self, error: BaseException) -> None:
        """Let the device fail behind everything that was queued so far."""
        self.put(partial(_raise, error))

    def launching(self) -> AbstractContextManager[object]:
        return _queueing(self.put, self.synchronize)

    def synchronize(self) -> None:
        self.put(lambda: None).result()
        self.check()

    def check(self) -> None:
        if self._error is not None:
            raise device_failed(self._error) from self._error

    def upload(self, host: Tensor, target: Tensor) -> Any:
        last = self._uploads.get(host.data_ptr())
        assert last is None or last.is_over, "pinned memory was used again while it was being copied"
        copied = host.clone()

        def copy() -> None:
            assert torch.equal(host, copied), "pinned memory was changed while it was being copied"
            target.copy_(host)

        event = self._uploads[host.data_ptr()] = _Event(host, self._at_once_or_queued(copy))  # type: ignore[assignment]
        return event

    def _at_once_or_queued(self, work: Work) -> Future[Any]:
        done = self.put(work)
        if not _is_launching():
            done.result()
        return done

    def download(self, tensors: Sequence[Tensor]) -> Any:
        def copy() -> list[Tensor]:
            time.sleep(self.slow_seconds)
            return [tensor.clone() for tensor in tensors]

        download = _Download(self.put(copy), self.check)
        self.downloads.append(download)  # type: ignore[arg-type]
        return download

    def capture(self, run: Callable[[], None], pool: object) -> Any:
        work: list[Work] = []
        with _queueing(work.append, _no_waiting):
            run()
        graph = _Graph(work, self.put)
        self.graphs.append(graph)  # type: ignore[arg-type]
        return graph

    def mark(self) -> Any:
        return self.put(time.perf_counter)

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(end.result() - start.result())

    def connect(self, store: dist.Store, rank: int, size: int, limit: timedelta) -> FakeTransport:
        return _Transport(store, rank, size, self)


class _Event:
    def __init__(self, host: Tensor, copied: Future[Any]) -> None:
        self.host, self._copied, self.is_over = (
            host,
            copied,
            False,
        )  # the host's memory is kept: nothing else lies there

    def synchronize(self) -> None:
        self._copied.result()
        self.is_over = True


class _Download:
    def __init__(self, copied: Future[Any], check: Callable[[], None]) -> None:
        self._copied, self._check, self.num_waits = copied, check, 0

    def is_done(self) -> bool:
        return self._copied.done()

    def wait(self) -> Iterator[Tensor]:
        self.num_waits += 1
        assert self.num_waits == 1, "waited for twice"
        on_host = self._copied.result()
        if on_host is None:
            self._check()
        return iter(on_host)


class _Graph:
    def __init__(self, work: list[Work], put: Callable[[Work], object]) -> None:
        self._work, self._put, self.num_replays = work, put, 0

    def replay(self) -> None:
        self.num_replays += 1
        for each in self._work:
            self._put(each)


class _Transport(FakeTransport):
    """Waits in the place of the device, and not of the host."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: QueuedAccelerator) -> None:
        super().__init__(store, rank, size)
        self._device, self._last = device, _Queued()
        self._last.wait()

    def _begin(self, work: Callable[..., None], *arguments: Any) -> Any:
        assert self._last.is_awaited, "nobody waits for the operation before: on a GPU, its memory is used at once"
        waiting = partial(_wait_for, super()._begin, work, *arguments)
        if _is_launching():
            _launching.sink(waiting)
        else:
            self._device.put(waiting).result()
        self._last = _Queued()
        return self._last


class _Queued:
    is_awaited = False

    def wait(self) -> None:
        """The device waits, and not the host."""
        self.is_awaited = True


def _wait_for(begin: Callable[..., Any], *arguments: Any) -> None:
    begin(*arguments).wait()


def _raise(error: BaseException) -> None:
    raise error


def _no_waiting() -> None:
    raise AssertionError("the host waits for the device within a capture")


def _is_launching() -> bool:
    return getattr(_launching, "sink", None) is not None


@contextmanager
def _queueing(sink: Callable[[Work], object], wait: Callable[[], None]) -> Iterator[None]:
    """Within the block, this thread's work goes to `sink`."""
    before = getattr(_launching, "sink", None)
    _launching.sink = sink
    try:
        with _Queueing(sink, wait):
            yield
    finally:
        _launching.sink = before


@contextmanager
def _at_once() -> Iterator[None]:
    """Within the block, this thread works itself: on tensors of the host."""
    before, _launching.sink = getattr(_launching, "sink", None), None
    try:
        with _disable_current_modes():
            yield
    finally:
        _launching.sink = before


class _Queueing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Queues torch's functions. Views are made at once; a function whose result the host needs waits for the device."""

    def __init__(self, sink: Callable[[Work], object], wait: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sink, self._wait = sink, wait

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not given:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._sink(partial(func, *args, **kwargs))
            written = [
                kwargs[argument.name] if argument.kwarg_only else args[index]
                for index, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
        shapes = _kept_shapes_of(func, args, kwargs)
        if shapes is None:  # the result depends on values
            self._wait()
            return func(*args, **kwargs)
        if shapes == "view":
            return func(*args, **kwargs)
        results = tree_map(_memory_like, shapes)

        def compute() -> None:
            for result, computed in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(result, Tensor):
                    result.copy_(computed)

        self._sink(compute)
        return results


def _memory_like(shape: object) -> object:
    if not isinstance(shape, Tensor):
        return shape
    memory = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
    return memory.fill_(torch.nan if memory.is_floating_point() else 1)  # until it is computed


def _kept_shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """_shapes_of, which is a third of a launch: once for each function, with arguments of the same shapes."""
    key = (func, _without_values(args), tuple((name, _without_values(value)) for name, value in kwargs.items()))
    if key not in _shapes:
        _shapes[key] = _shapes_of(func, args, kwargs)
    return _shapes[key]


def _without_values(value: object) -> Hashable:
    """What the shapes of a function's results depend on."""
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_without_values, value))
    return type(value), value  # True is no 1 here


def _shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """The results on tensors without values; "view" if they have the memory of an argument; None: it needs values."""
    without_values: dict[int, Tensor] = {}

    def of(value: object) -> object:
        if isinstance(value, Tensor):
            if id(value) not in without_values:
                without_values[id(value)] = torch.empty_strided(
                    value.size(), value.stride(), dtype=value.dtype, device="meta"
                )
            return without_values[id(value)]
        return torch.device("meta") if isinstance(value, torch.device) else value

    try:
        found = func(*tree_map(of, args), **tree_map(of, kwargs))
    except (RuntimeError, NotImplementedError):
        return None
    tensors = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
    if not tensors:
        return None
    memory = {each.untyped_storage()._cdata for each in without_values.values()}
    shared = [each.untyped_storage()._cdata in memory for each in tensors]
    assert all(shared) or not any(shared), func
    return "view" if all(shared) else found


class _QueuedExtension:
    """Stands for the extension. Kernels that a launching thread calls are queued, with their tensors."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._extension, name)
        is_kernel = isinstance(member, type) and issubclass(member, self._extension.KernelCall)
        if not is_kernel or name in OF_HOSTS or not _is_launching():
            return member
        return partial(_QueuedCall, member, _launching.sink)


class _QueuedCall:
    def __init__(self, kind: Any, sink: Callable[[Work], object], **fields: Any) -> None:
        self._call, self._fields, self._sink = kind(**fields), fields, sink

    def run(self) -> None:
        self._sink(self._run)

    def _run(self) -> None:
        self._call.run()


def run_ahead(replace: Callable[[object, str, object], None]) -> None:
    """From now on, runners launch their steps on a QueuedAccelerator without waiting. `replace`: sets an attribute."""
    submit, finish = ModelRunner.submit, ModelRunner._finish_oldest

    def submit_ahead(runner: ModelRunner, batch: Any) -> Any:
        if not isinstance(runner.device, QueuedAccelerator):
            return submit(runner, batch)
        with runner.device.launching():
            return submit(runner, batch)

    def finish_at_once(runner: ModelRunner) -> None:
        with _at_once():
            finish(runner)

    replace(ModelRunner, "submit", submit_ahead)
    replace(ModelRunner, "_finish_oldest", finish_at_once)
    replace(cpu, "_C", _QueuedExtension(cpu._C))
    replace(sampler, "_logits_on_host", sampler.logits_of_tokens)  # numpy would read before the device has computed
    replace(sampler, "_reasons", lambda *tensors: {})  # a GPU is not waited for, to say why there is no token
