"""Groups of ranks on the GPUs of one machine. Tensors go from GPU to GPU, and the hosts agree through shared memory.

A GPU computes behind its host. So a rank that has launched a collective operation cannot take it back, and the other
GPUs would wait for a rank that never comes. Therefore the hosts agree once per step, before they launch anything that
needs other ranks. Until then a rank may leave the step. Later, an error ends all ranks of the engine.

Dimensions: T rows, N columns of all ranks, G ranks of the group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from quire.distributed.group import GroupError, Ranks
from quire.distributed.shared_memory import SharedMemoryGroup
from quire.errors import EngineDeadError
from quire.forward_batch import ForwardBatch, LayerCache
from quire.kernels.layer_rules import AttentionRule

LOOK_SECONDS = 0.25  # seconds between two looks for a rank that has failed
CLOSE_SECONDS = 1.0  # the longest wait for the end of the transport
# The transport has a time limit too, with which it ends the process. Ours comes first and names the late rank.
TIMES_OF_LIMIT = 2

_distributed: Any = torch.distributed  # without types in some versions of torch


class Connecting(Protocol):
    """The part of an Accelerator that a group needs."""

    device: torch.device

    def connect(self, store: Any, rank: int, size: int, limit: timedelta) -> Any:
        """See Accelerator."""
        ...

    def check(self) -> None:
        """See Accelerator."""
        ...


def on_devices(ranks: Ranks, accelerator: Connecting) -> Ranks:
    """The same ranks, whose stage exchanges tensors between devices. All ranks of the stage must call this.

    Raises GroupError.
    """
    host = ranks.group
    assert isinstance(host, SharedMemoryGroup), "resolve refuses GPUs for ranks of several machines"
    # The transport finds the other ranks in a file without a name, so nothing is left when a rank is killed. The file
    # is never closed: a store opens it by its number whenever it is used, even while it is destroyed.
    own = torch.empty((1, 0), dtype=torch.int64)
    if host.rank == 0:
        own = torch.tensor([[os.getpid(), os.memfd_create("quire-meeting", os.MFD_CLOEXEC)]])
    pid, descriptor = host.gather(own, [2] + [0] * (host.size - 1))[0].tolist()
    store = _distributed.FileStore(f"/proc/{pid}/fd/{descriptor}", host.size)
    limit = timedelta(seconds=TIMES_OF_LIMIT * ranks.timeout_seconds)
    transport = accelerator.connect(store, host.rank, host.size, limit)
    group = DeviceGroup(host, transport, accelerator.check, ranks.fail)
    try:
        group.gather(torch.zeros((1, 1), device=accelerator.device), [1] * host.size)
    except BaseException:
        group.close()
        raise
    return replace(ranks, group=group)


class DeviceGroup:
    """A Group of ranks whose tensors are on devices. Its results have the bits of a SharedMemoryGroup.

    Args:
        host: the same ranks, for the hosts.
        transport: a backend of torch.distributed, such as ProcessGroupNCCL.
        check_device: see Accelerator.check.
        fail: tells all ranks that this rank's device has failed.
    """

    is_committed = False

    def __init__(
        self,
        host: SharedMemoryGroup,
        transport: Any,
        check_device: Callable[[], None],
        fail: Callable[[EngineDeadError], None],
    ) -> None:
        self.rank, self.size = host.rank, host.size
        self._host, self._transport = host, transport
        self._check_device, self._fail = check_device, fail
        self._has_steps = False  # before, graphs are captured, and no other thread may ask the device
        self._is_closed = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="failed ranks", daemon=True)
        self._watching.start()

    @property
    def waited_seconds(self) -> float:
        """See Group. It counts the waits of the host, and not those of the device."""
        return self._host.waited_seconds

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        T, width = len(part), max(widths)
        if T * width == 0:
            return part.new_empty((T, sum(widths)))
        self.agree()
        own_TW = part if part.shape[1] == width else F.pad(part, (0, width - part.shape[1]))
        own_TW = own_TW.contiguous()
        all_GTW = part.new_empty((self.size, T, width))
        self._transport._allgather_base(all_GTW.view(-1, width), own_TW).wait()
        if min(widths) == width:
            return all_GTW.transpose(0, 1).reshape(T, self.size * width)
        return torch.cat([each[:, :count] for each, count in zip(all_GTW, widths, strict=True)], 1)

    def gather_to_first(self, part: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        all_TN = self.gather(part, widths)
        if self.rank != 0:
            return part[:, :0]
        return all_TN if out is None else out.copy_(all_TN)

    def gather_rows(self, part: Tensor, widths: Sequence[int], owners_T: Tensor) -> Tensor:
        raise AssertionError("the first rank samples all rows")

    def exchange(
        self, rows_PN: Tensor, begins: Tensor, firsts: Sequence[int], columns: range, num_rows: int | None = None
    ) -> Tensor:
        raise AssertionError("resolve refuses whole experts of ranks on GPUs")

    def attend(
        self,
        q_THE: Tensor,
        cache: LayerCache,
        batch: ForwardBatch,
        rule: AttentionRule,
        heads: Sequence[int],
        num_owners: int,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        raise AssertionError("resolve refuses a divided KV cache on GPUs")

    def agree(self) -> None:
        if not self.is_committed:
            self._host.meet()
            self.is_committed = True

    def check(self) -> None:
        if self._host.failed_rank is not None:
            raise GroupError(f"rank {self._host.failed_rank} has failed")

    def begin_step(self) -> None:
        self.is_committed, self._has_steps = False, True
        self._host.begin_step()

    def end_step(self) -> None:
        self._host.end_step()

    def void_step(self) -> None:
        self._host.void_step()

    def leave_step(self) -> None:
        self._host.leave_step()

    def close(self) -> None:
        self._is_closed.set()
        self._watching.join(CLOSE_SECONDS)

    def _watch(self) -> None:
        """End the transport when another rank has failed, for which the device would wait for ever, or at the end.

        NCCL ends what waits at once, but returns only when no graph holds its operations any more.

        The device of this rank is looked at too: its host may be waiting for a rank that waits for this device.
        """
        while not self._is_closed.wait(LOOK_SECONDS) and self._host.failed_rank is None:
            if self._has_steps:
                try:
                    self._check_device()
                except EngineDeadError as error:
                    self._fail(error)
                except Exception as error:
                    self._fail(EngineDeadError(f"A GPU cannot be looked at: {error}"))
        self._transport.abort()
