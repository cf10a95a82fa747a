"""Ranks on the GPUs of one machine. Tensors go from GPU to GPU, and the hosts agree through shared memory.

A GPU computes behind its host. So a rank that has launched an operation with other ranks cannot take it back, and the
other GPUs would wait for a rank that never comes. Therefore the hosts of all ranks agree once per step, before they
launch anything that needs other ranks. Until then a rank may leave the step, and all ranks of all stages leave it too.
Later, an error ends all ranks of the engine.

GPUs of several stages wait only along the stages and the steps. A stage receives the rows of step k when it has sent
those of step k - 1. So no GPUs wait for each other in a circle.

Dimensions: T rows, N columns of all ranks, D hidden, G ranks of the group, P rows of all ranks, C columns of a rank, H
heads, E head dim, V value dim; in `attend`, N neighbours and W = V + 2.
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
from quire.kernels import gpu
from quire.kernels.layer_rules import AttentionRule
from quire.kernels.partial_attention import Partials, join_partials, partial_attention

LOOK_SECONDS = 0.25  # seconds between two looks for a rank that has failed
CLOSE_SECONDS = 1.0  # the longest wait for the end of the transport
# The transport has a time limit too, with which it ends the process. Ours comes first and names the late rank.
TIMES_OF_LIMIT = 2

_distributed: Any = torch.distributed  # without types in some versions of torch


class Connecting(Protocol):
    """The part of an Accelerator that ranks need."""

    device: torch.device

    def connect(self, store: Any, rank: int, size: int, limit: timedelta) -> Any:
        """See Accelerator."""
        ...

    def check(self) -> None:
        """See Accelerator."""
        ...


def on_devices(ranks: Ranks, accelerator: Connecting) -> Ranks:
    """The same ranks, which exchange tensors between devices. All ranks must call this.

    Raises GroupError.
    """
    hosts, grid = ranks.hosts, ranks.grid
    assert isinstance(hosts, SharedMemoryGroup), "resolve refuses GPUs for ranks of several machines"
    store, limit = _meeting(hosts), timedelta(seconds=TIMES_OF_LIMIT * ranks.timeout_seconds)
    agreement = Agreement(hosts, accelerator.check, ranks.fail)

    def connect(name: str, members: Sequence[int]) -> Any:
        own = _distributed.PrefixStore(name, store)
        transport = accelerator.connect(own, members.index(ranks.rank), len(members), limit)
        agreement.end_with_failure(transport)
        return transport

    def link(transport: Any, other: int | None) -> DeviceLink | None:
        return None if other is None else DeviceLink(transport, other, agreement, accelerator.device)

    group = before_link = behind_link = None
    try:
        if ranks.group is not None:
            members = grid.stage_members(ranks.rank)
            transport = connect(f"stage {grid.stage(ranks.rank)}", members)
            group = DeviceGroup(members.index(ranks.rank), len(members), transport, agreement)
        if grid.num_stages > 1:
            transport = connect("stages", range(grid.size))
            before_link = link(transport, grid.before(ranks.rank))
            behind_link = link(transport, grid.behind(ranks.rank))
        _reach(group, before_link, behind_link, accelerator.device)
    except BaseException:
        agreement.close()
        raise
    return replace(ranks, group=group, before=before_link, behind=behind_link, steps=(agreement,))


def _reach(
    group: DeviceGroup | None, before: DeviceLink | None, behind: DeviceLink | None, device: torch.device
) -> None:
    """Use each connection once. A transport connects in its first operation, and no graph may hold this."""
    if group is not None:
        group.gather(torch.zeros((1, 1), device=device), [1] * group.size)
    if before is not None:
        before.receive(1, 1, torch.float32)
    if behind is not None:
        behind.send(torch.zeros((1, 1), device=device))


def _meeting(hosts: SharedMemoryGroup) -> Any:
    """A store where the transports of these ranks find each other.

    It is a file without a name, so nothing is left when a rank is killed. The file is never closed: a store opens it by
    its number whenever it is used, even while it is destroyed.
    """
    own = torch.empty((1, 0), dtype=torch.int64)
    if hosts.rank == 0:
        own = torch.tensor([[os.getpid(), os.memfd_create("quire-meeting", os.MFD_CLOEXEC)]])
    pid, descriptor = hosts.gather(own, [2] + [0] * (hosts.size - 1))[0].tolist()
    return _distributed.FileStore(f"/proc/{pid}/fd/{descriptor}", hosts.size)


class Agreement:
    """The Steps of ranks on devices: their hosts agree before they launch what needs other ranks.

    Args:
        hosts: all ranks.
        check_device: see Accelerator.check.
        fail: tells all ranks that this rank's device has failed.

    Attributes:
        transports: the backends of torch.distributed that end when a rank fails.
    """

    is_committed = False
    do_hosts_agree = True

    def __init__(
        self, hosts: SharedMemoryGroup, check_device: Callable[[], None], fail: Callable[[EngineDeadError], None]
    ) -> None:
        self.transports: list[Any] = []
        self._hosts, self._check_device, self._fail = hosts, check_device, fail
        self._has_steps = False  # before, graphs are captured, and no other thread may ask the device
        self._is_closed = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="failed ranks", daemon=True)
        self._watching.start()

    def end_with_failure(self, transport: Any) -> None:
        """From now on, a rank that fails ends this transport too. Raises GroupError if one has failed already."""
        self.transports.append(transport)
        try:
            self.check()
        except GroupError:
            transport.abort()  # the thread may have ended the others before it knew this one
            raise

    @property
    def waited_seconds(self) -> float:
        """See Steps. It counts the waits of the host, and not those of the device."""
        return self._hosts.waited_seconds

    def agree(self) -> None:
        """See Group."""
        if not self.is_committed:
            self._hosts.meet()
            self.is_committed = True

    def check(self) -> None:
        if self._hosts.failed_rank is not None:
            cause = self._hosts.cause
            raise GroupError(f"rank {self._hosts.failed_rank} has failed{cause and f': {cause}'}")

    def begin_step(self) -> None:
        self.is_committed, self._has_steps = False, True
        self._hosts.begin_step()

    def end_step(self) -> None:
        self._hosts.end_step()

    def void_step(self) -> None:
        self._hosts.void_step()

    def leave_step(self) -> None:
        self._hosts.leave_step()

    def close(self) -> None:
        self._is_closed.set()
        self._watching.join(CLOSE_SECONDS)

    def _watch(self) -> None:
        """End the transports when another rank has failed, for which the device would wait for ever, or at the end.

        NCCL ends what waits at once, but returns only when no graph holds its operations any more, and perhaps only
        when the device has done its work. So no transport waits for another one to end.

        The device of this rank is looked at too: its host may be waiting for a rank that waits for this device.
        """
        while not self._is_closed.wait(LOOK_SECONDS) and self._hosts.failed_rank is None:
            if self._has_steps:
                try:
                    self._check_device()
                except EngineDeadError as error:
                    self._fail(error)
                except Exception as error:
                    self._fail(EngineDeadError(f"A GPU cannot be looked at: {error}"))
        ending = [threading.Thread(target=each.abort, name="end of ranks", daemon=True) for each in self.transports]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()


class DeviceGroup:
    """A Group of ranks whose tensors are on devices. Apart from `attend`, results have the bits of a SharedMemoryGroup.

    Args:
        transport: a backend of torch.distributed for these ranks, such as ProcessGroupNCCL.
        agreement: of all ranks of all stages.
    """

    def __init__(self, rank: int, size: int, transport: Any, agreement: Agreement) -> None:
        self.rank, self.size = rank, size
        self._transport, self._agreement = transport, agreement

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
        self,
        rows_PN: Tensor,
        begins: Tensor,
        firsts: Sequence[int],
        columns: Sequence[range],
        num_rows: int | None = None,
    ) -> Tensor:
        """See Group. Every rank sends its columns of all P rows to each rank, because the host does not know its own.

        So a rank sends G times as many bytes as through shared memory.
        """
        assert num_rows is None, "resolve refuses lanes on GPUs"
        P, own = len(rows_PN), columns[self.rank]
        if P == 0:
            return rows_PN.new_empty((P, len(own)))
        self.agree()
        sent_GPC = rows_PN.new_empty((self.size, P, max(map(len, columns))))
        for sent_PC, its in zip(sent_GPC, columns, strict=True):
            sent_PC[:, : len(its)] = rows_PN[:, its.start : its.stop]
        got_GPC = self._to_all(sent_GPC, [1] * self.size, [1] * self.size)
        ends = torch.cat([begins[first : first + 1] for first in firsts[1:-1]])
        rows_P = torch.arange(P, dtype=torch.int32, device=rows_PN.device)
        owners_P = torch.bucketize(rows_P, ends, right=True)
        own_GPC = got_GPC[:, :, : len(own)]
        return own_GPC.gather(0, owners_P.view(1, P, 1).expand(1, P, len(own)))[0]

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
        """See Group. A rank joins its own pages first, and then those of its neighbours, one partial result of each.

        So the last bits of a token depend on which of them has which page.
        """
        owner, own, V = self.rank % num_owners, heads[self.rank], cache.v_BGPE.shape[3]
        neighbours, (T, H, _) = range(self.rank - owner, self.rank - owner + num_owners), q_THE.shape
        self.agree()
        tables_SM = batch.tables[cache.table].block_tables_SM
        arguments = (q_THE, cache, tables_SM, batch.seq_lens_S, batch.cu_seqlens_q_S1, rule, num_owners, owner)
        values_THV, maxima_TH, sums_TH = partial_attention(*arguments)
        sent_HTW = values_THV.new_empty((H, T, V + 2))
        sent_HTW[..., :V] = values_THV.transpose(0, 1)
        sent_HTW[..., V] = maxima_TH.T
        sent_HTW[..., V + 1] = sums_TH.T
        del values_THV, maxima_TH, sums_TH  # memory for what arrives
        sent = [heads[rank] if rank in neighbours else 0 for rank in range(self.size)]
        got = [own if rank in neighbours else 0 for rank in range(self.size)]
        got_NTHW = self._to_all(sent_HTW, sent, got).view(num_owners, own, T, V + 2).transpose(1, 2)
        del sent_HTW
        partials = Partials(got_NTHW[..., :V], got_NTHW[..., V], got_NTHW[..., V + 1])
        return join_partials(partials, sinks_H, q_THE.dtype).contiguous()

    def _to_all(self, sent: Tensor, num_sent: Sequence[int], num_got: Sequence[int]) -> Tensor:
        """Send entries to all ranks, those for rank 0 first. The result has the entries from rank 0 first.

        Args:
            num_sent: the number of entries for each rank.
            num_got: the number of entries from each rank.
        """
        got = sent.new_empty((sum(num_got), *sent.shape[1:]))
        self._transport.alltoall_base(got, sent, list(num_got), list(num_sent)).wait()
        return got

    def agree(self) -> None:
        self._agreement.agree()


class DeviceLink:
    """A Link between the devices of two ranks. The device of the sender waits for the receiver, and the host does not.

    With as many batches in flight as stages, this costs little: the receiver has finished the batch before.

    Args:
        transport: a backend of torch.distributed for all ranks.
        other: the number of the other rank among all ranks.
        agreement: of all ranks.
        device: the device of this rank.
    """

    waited_seconds = 0.0  # the host waits in the agreement

    def __init__(self, transport: Any, other: int, agreement: Agreement, device: torch.device) -> None:
        self._transport, self._other, self._agreement, self._device = transport, other, agreement, device

    def send(self, rows_TD: Tensor) -> None:
        self._agreement.agree()
        self._transport.send([rows_TD.contiguous()], self._other, 0).wait()

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        self._agreement.agree()
        rows_TD = torch.empty((num_rows, width), dtype=dtype, device=self._device)
        self._transport.recv([rows_TD], self._other, 0).wait()
        return rows_TD

    def send_back(self, rows_TD: Tensor) -> None:
        self.send(gpu.place(rows_TD, self._device))

    def receive_back(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self.receive(num_rows, width, dtype)

    def close(self) -> None:
        """There is nothing to close: the agreement ends the transport."""
