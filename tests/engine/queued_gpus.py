"""Lets ranks compute on devices that are behind their hosts. `python -m tests.engine.queued_gpus WHERE NUMBER` is the
process of a rank whose device fails at the NUMBER-th step of a request: "before" its work, or "behind" its exchanges.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels import gpu_facts
from quire.loader import load
from quire.models.form import ModelForm
from quire.resolve import GpuFacts
from quire.schedule import ScheduledBatch
from quire.worker.worker import DeviceWorker
from tests.worker.queued_accelerator import QueuedAccelerator, run_ahead

GIB = 1 << 30


class OnCpu(ModelForm):
    """Of a model whose tensors are on the CPU, although its device is a GPU."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named | {"device": torch.device("cpu"), "attention_backend": "auto"})


def use_them(replace: Callable[[object, str, object], None], accelerator: type = QueuedAccelerator) -> None:
    """Let this process find GPUs, which are queued accelerators. `replace`: sets an attribute."""
    replace(gpu_facts, "detect", lambda: GpuFacts("queued", 90, GIB, GIB, 2))
    replace(load, "ModelForm", OnCpu)
    replace(DeviceWorker.__init__, "__defaults__", (accelerator, None))
    run_ahead(replace)


def _main(where: str, number: int) -> None:
    from quire.engine import rank_process

    steps, launch = list[bool](), DeviceWorker._launch_as

    class Failing(QueuedAccelerator):
        def download(self, tensors: Sequence[Tensor]) -> Any:
            self.fail_in("behind")
            return super().download(tensors)

        def fail_in(self, place: str) -> None:
            if place == where and sum(steps) == number and steps[-1]:
                self.fail(ValueError("it is gone"))

    def launch_as(worker: DeviceWorker, ranks: Any, batch: ScheduledBatch) -> Any:
        steps.append(batch.request_ids[0].startswith("r"))  # not the warm-up
        assert isinstance(worker.runner.device, Failing)
        worker.runner.device.fail_in("before")
        return launch(worker, ranks, batch)

    DeviceWorker._launch_as = launch_as  # type: ignore[method-assign]
    use_them(setattr, Failing)
    rank_process.main()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
