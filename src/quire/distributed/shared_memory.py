"""Ranks on one machine, processes or threads, that share memory. The memory has no name: it ends with its last owner.

Dimensions: T rows, N columns of all ranks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels import cpu, extension

SLOT_BYTES = 1 << 20  # of a rank in a turn; larger results take several turns
# A rank that waits looks for so long before it sleeps. It has a core of its own, or others need the core.
SPIN_MICROSECONDS, SHORT_SPIN_MICROSECONDS = 200, 5
TIMEOUT_SECONDS = 600.0  # for one turn: a step of another rank that is still computing


def make_memory(size: int) -> int:
    """A file descriptor of memory for so many ranks. Whoever has it closes it. Raises ConfigError or OSError."""
    num_bytes = extension.require("Tensor parallelism").SharedGroup.num_bytes(size=size, slot_bytes=SLOT_BYTES)
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, num_bytes)
    return memory


class SharedMemoryGroup:
    """A Group. A rank may go through the memory only once: later groups need other memory.

    Args:
        memory: of `make_memory`, which the caller may close afterwards.
        has_own_cores: no other rank needs the core that this one waits on.
    """

    def __init__(
        self,
        memory: int,
        rank: int,
        size: int,
        *,
        has_own_cores: bool = True,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        if not extension.is_used():
            raise ConfigError(
                "Tensor parallelism needs the compiled kernels, which are not used",
                value=size,
                fix="Unset QUIRE_FORCE_REFERENCE, or leave --tensor-parallel-size out",
                param="tensor_parallel_size",
            )
        self.rank, self.size = rank, size
        self._group = extension.C.SharedGroup(
            fd=memory,
            rank=rank,
            size=size,
            slot_bytes=SLOT_BYTES,
            spin_microseconds=SPIN_MICROSECONDS if has_own_cores else SHORT_SPIN_MICROSECONDS,
            timeout_seconds=timeout_seconds,
        )

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        out = torch.empty((part.shape[0], sum(widths)), dtype=part.dtype, device=part.device)
        cpu.gather(self._group, part, widths, out)
        return out

    def gather_to_first(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        if self.rank == 0:
            return self.gather(part, widths)
        cpu.gather(self._group, part, widths, None)
        return part[:, :0]

    def begin_step(self) -> None:
        self._group.begin_step()

    def end_step(self) -> None:
        self._group.end_step()

    def leave_step(self) -> None:
        self._group.leave_step()

    def fail(self) -> None:
        self.fail_for(self.rank)

    def fail_for(self, rank: int) -> None:
        """Another rank cannot say it any more."""
        self._group.abort(rank)

    @property
    def failed_rank(self) -> int | None:
        """The first one that failed."""
        rank = int(self._group.aborted)
        return None if rank < 0 else rank
