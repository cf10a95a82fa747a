"""Lets ranks run the kernels of a GPU under Triton's interpreter.

The interpreter replaces functions of Triton for the whole process, so each rank needs a process of its own. `python -m
tests.engine.interpreted_gpus FILE` is one; it writes the names of its kernels to the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.kernels import cpu, gpu, gpu_facts
from quire.loader import load
from quire.resolve import GpuFacts
from quire.worker import gpu_memory
from quire.worker.gpu_memory import GpuWork
from quire.worker.worker import DeviceWorker
from tests import triton_interpreter
from tests.engine.queued_gpus import OnCpu
from tests.examples import IS_FULL
from tests.worker.fake_accelerator import FakeAccelerator

GIB = 1 << 30
WHY_NOT = triton_interpreter.why_not()


class Kernels:
    """Stands for the module of kernels. `names`: of those that were called."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def __getattr__(self, name: str) -> object:
        from quire.kernels.triton import kernels

        self.names[name] = None
        return getattr(kernels, name)


def use_them(kernels: Kernels, replace: Callable[[object, str, object], None]) -> None:
    """Let this process find GPUs, and run their kernels on tensors of the CPU. `replace`: sets an attribute."""
    replace(gpu, "kernels", lambda: kernels)
    replace(gpu_facts, "detect", lambda: GpuFacts("interpreted", 90, GIB, GIB, 2))
    replace(gpu, "serves", lambda device: True)
    replace(cpu, "_available", False)
    replace(load, "ModelForm", OnCpu)
    replace(DeviceWorker.__init__, "__defaults__", (FakeAccelerator, None))
    if not IS_FULL:  # it runs as many steps as a test does; test_ranks_on_gpus.py has ranks that measure
        work = GpuWork(step_bytes=1 << 20, graph_bytes=1 << 20, largest_step=(16, 0.01))
        replace(gpu_memory, "measure_work", lambda *arguments: work)


def _main(file: Path) -> None:
    """The process of a rank. It notes its kernels whenever it has no order, because it is ended from outside."""
    from quire.engine import rank_orders, rank_process

    kernels, next_order = Kernels(), rank_orders._next_order

    def note(*arguments: Any) -> Any:
        written = file.with_suffix(".new")
        written.write_text(" ".join(kernels.names))
        written.replace(file)
        return next_order(*arguments)

    use_them(kernels, setattr)
    rank_orders._next_order = note
    rank_process.main()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
