"""Groups of ranks, which exchange tensors through shared memory. Ranks are processes or threads.

The memory has no name. So the system frees it when its last owner ends. If a stage or lanes have ranks on several
machines, each machine has such memory, and ranks send what they write there to the other machines.

Dimensions: T rows, N columns of all ranks.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire import extension
from quire.distributed import wire
from quire.distributed.group import Link, Ranks
from quire.distributed.layout import Grid
from quire.distributed.network import SocketLink
from quire.distributed.whereabouts import Whereabouts
from quire.errors import ConfigError, EngineDeadError
from quire.forward_batch import ForwardBatch, LayerCache
from quire.kernels import cpu
from quire.kernels.layer_rules import AttentionRule

if TYPE_CHECKING:
    from quire import _C

SLOT_BYTES = 1 << 20  # the bytes of a rank in one turn; larger results take several turns
# The time that a waiting rank spins before it sleeps: if it has a core of its own, and if others need the core.
SPIN_MICROSECONDS, SHORT_SPIN_MICROSECONDS = 200, 5


def make_memory(grid: Grid) -> int:
    """Make memory for the ranks of a node. Returns a file descriptor, which the caller closes.

    Raises ConfigError if the compiled kernels are not in use, and OSError.
    """
    extension.require("A model that ranks share")
    group = extension.C.SharedGroup
    num_bytes = group.first_part + sum(
        group.num_bytes(size=len(members), slot_bytes=SLOT_BYTES) for members in grid.groups()
    )
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, num_bytes)
    return memory


def ranks_on(
    memory: int,
    rank: int,
    grid: Grid,
    links: Mapping[int, int] = MappingProxyType({}),
    *,
    has_own_cores: bool,
    timeout_seconds: float,
) -> Ranks:
    """Connect a rank to the others. A rank may use the memory only once: later ranks need new memory.

    Args:
        memory: the result of `make_memory`. The caller may close it afterwards.
        links: file descriptors of the connections to ranks of other machines, by rank. The result closes them. They are
            closed too if this function raises.
        has_own_cores: whether no other rank needs the core on which this rank waits.
        timeout_seconds: the longest wait for one turn. Another rank may still be computing during this time.

    Raises ConfigError if the compiled kernels are not in use.
    """
    with ExitStack() as on_error:
        peers = {other: on_error.enter_context(socket.socket(fileno=descriptor)) for other, descriptor in links.items()}
        for peer in peers.values():
            peer.settimeout(None)  # a program may have set a default, and then threads of the group would not wait
        if not extension.is_used():
            raise ConfigError(
                "A model that ranks share needs the compiled kernels, which are not used",
                value=grid.size,
                fix="Unset QUIRE_FORCE_REFERENCE, or leave --tensor-parallel-size and --pipeline-parallel-size out",
                param="tensor_parallel_size",
            )
        whereabouts = Whereabouts(memory, rank, grid.ranks_of(grid.node(rank)), _hosts(grid, peers))
        found = _groups(memory, rank, grid, peers, has_own_cores=has_own_cores, timeout_seconds=timeout_seconds)
        group, hosts = found.get(grid.stage_members(rank)), found.get(tuple(grid.ranks_of(grid.node(rank))))
        everyone = found[grid.widest_members(rank)] if grid.num_lanes > 1 else None
        failing = _Failing(list(found.values()), list(peers.values()))

        def link(sender: int | None, receiver: int | None) -> Link | None:
            if sender is None or receiver is None:
                return None
            other = sender if receiver == rank else receiver
            return (
                SocketLink(peers[other], other, whereabouts, failing)
                if other in peers
                else SharedMemoryLink(found[sender, receiver])
            )

        ranks = Ranks(
            rank,
            grid,
            failing=failing,
            whereabouts=whereabouts,
            timeout_seconds=timeout_seconds,
            group=group,
            before=link(grid.before(rank), rank),
            behind=link(rank, grid.behind(rank)),
            everyone=everyone,
            hosts=hosts,
            steps=tuple(each for each in (group, everyone) if each is not None),
        )
        on_error.pop_all()
    return ranks


def _hosts(grid: Grid, peers: Mapping[int, socket.socket]) -> dict[int, str]:
    """The addresses of ranks of other machines, as far as there is a connection to their machine."""
    nodes = dict[int, str]()
    for other, peer in peers.items():
        with suppress(OSError):  # an end that has closed has no address any more
            nodes[grid.node(other)] = peer.getpeername()[0] if peer.family != socket.AF_UNIX else ""
    return {rank: nodes[grid.node(rank)] for rank in range(grid.size) if nodes.get(grid.node(rank))}


def _groups(
    memory: int,
    rank: int,
    grid: Grid,
    peers: Mapping[int, socket.socket],
    *,
    has_own_cores: bool,
    timeout_seconds: float,
) -> dict[tuple[int, ...], SharedMemoryGroup]:
    """The groups of a rank in the memory, by their members.

    Args:
        peers: the connections to ranks of other machines.
    """
    begin = extension.C.SharedGroup.first_part
    found: dict[tuple[int, ...], SharedMemoryGroup] = {}
    for members in grid.groups(grid.node(rank)):
        if rank in members:
            own = {other: peers[other] for other in grid.peers(rank)} if members == grid.widest_members(rank) else {}
            shared = extension.C.SharedGroup(
                fd=memory,
                begin=begin,
                members=list(members),
                rank=members.index(rank),
                slot_bytes=SLOT_BYTES,
                spin_microseconds=SPIN_MICROSECONDS if has_own_cores else SHORT_SPIN_MICROSECONDS,
                timeout_seconds=timeout_seconds,
                peers=[(members.index(other), peer.fileno()) for other, peer in own.items()],
            )
            found[members] = SharedMemoryGroup(shared, members, rank, tuple(own.values()))
        begin += extension.C.SharedGroup.num_bytes(size=len(members), slot_bytes=SLOT_BYTES)
    return found


class _Failing:
    """A Failing over shared memory and links. All groups of a machine share one memory, so one group is told."""

    def __init__(self, groups: list[SharedMemoryGroup], peers: list[socket.socket]) -> None:
        self._groups, self._peers = groups, peers
        self.own_reason: EngineDeadError | None = None

    def fail_for(self, rank: int, reason: EngineDeadError | None = None, cause: int = 0) -> None:
        self.own_reason = self.own_reason or reason
        for group in self._groups[:1]:
            group.fail_for(rank, cause)
        for peer in self._peers:
            wire.end(peer)

    @property
    def failed_rank(self) -> int | None:
        return self._groups[0].failed_rank if self._groups else None

    @property
    def cause(self) -> str:
        return self._groups[0].cause if self._groups else ""


class SharedMemoryGroup:
    """A Group of ranks that share memory. Those of other machines have connections to ranks of this one.

    Args:
        shared: the group in the compiled extension (csrc/shared_group.cpp).
        members: the numbers of its ranks among all ranks.
        number: the number of this rank among all ranks.
        peers: this rank's connections to ranks of other machines. `close` closes them.
    """

    do_hosts_agree = False  # each stage has steps of its own

    def __init__(
        self, shared: _C.SharedGroup, members: tuple[int, ...], number: int, peers: Sequence[socket.socket] = ()
    ) -> None:
        self.rank, self.size = members.index(number), len(members)
        self._shared, self._peers = shared, peers
        self._rows = torch.empty(0)  # the memory of the results of gather_rows

    @property
    def waited_seconds(self) -> float:
        return self._shared.waited_seconds

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        return self.gather_to(None, part, widths)

    def gather_to_first(self, part: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        return self.gather_to(0, part, widths, out)

    def gather_to(self, reader: int | None, part: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Like `gather`, but if `reader` is given, only this rank gets the columns. The others get [T, 0]."""
        if reader not in (None, self.rank):
            cpu.gather(self._shared, part, widths, None, reader=reader)
            return part[:, :0]
        if out is None:
            out = torch.empty((part.shape[0], sum(widths)), dtype=part.dtype, device=part.device)
        cpu.gather(self._shared, part, widths, out, reader=reader)
        return out

    def gather_rows(self, part: Tensor, widths: Sequence[int], owners_T: Tensor) -> Tensor:
        num_rows, width = int((owners_T == self.rank).sum()), sum(widths)
        # The memory is kept. Fresh memory of this size in each step costs more than the exchange (benchmarks/NOTES.md).
        if self._rows.dtype != part.dtype or self._rows.numel() < num_rows * width:
            self._rows = torch.empty(num_rows * width, dtype=part.dtype)
        out = self._rows[: num_rows * width].view(num_rows, width)
        cpu.gather(self._shared, part, widths, out, owners_T)
        return out

    def exchange(
        self,
        rows_PN: Tensor,
        begins: Tensor,
        firsts: Sequence[int],
        columns: Sequence[range],
        num_rows: int | None = None,
    ) -> Tensor:
        num_rows = rows_PN.shape[0] if num_rows is None else num_rows
        own = columns[self.rank]
        out = torch.empty((num_rows, len(own)), dtype=rows_PN.dtype, device=rows_PN.device)
        cpu.exchange(self._shared, rows_PN, begins, firsts, own.start, out)
        return out

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
        owner = self.rank % num_owners
        first = self.rank - owner
        shape = (q_THE.shape[0], heads[self.rank], cache.v_BGPE.shape[3])
        out_THV = torch.empty(shape, dtype=q_THE.dtype, device=q_THE.device)
        members = (first, num_owners, owner, sum(heads[first : self.rank]))
        cpu.shared_attention(self._shared, q_THE, cache, batch, rule, out_THV, sinks_H, members)
        return out_THV

    is_committed = False

    def meet(self) -> None:
        """Wait until all ranks are here. Raises the errors of `gather`."""
        self.gather(torch.zeros((1, 1), dtype=torch.uint8), [1] * self.size)

    def agree(self) -> None:
        """There is nothing to do: ranks meet in each operation."""

    def check(self) -> None:
        """There is nothing to check: an operation raises its error itself."""

    def begin_step(self) -> None:
        self._shared.begin_step()

    def end_step(self) -> None:
        self._shared.end_step()

    def void_step(self) -> None:
        self._shared.void_step()

    def leave_step(self) -> None:
        self._shared.leave_step()

    def close(self) -> None:
        """End the connections. The system frees the memory with its last owner."""
        self._shared.close()
        for peer in self._peers:
            peer.close()

    def fail_for(self, rank: int, cause: int = 0) -> None:
        """Note that a rank (its number among all ranks) has failed. All ranks of all groups stop waiting.

        Args:
            cause: see Failing.fail_for.
        """
        self._shared.abort(rank, cause)

    @property
    def failed_rank(self) -> int | None:
        """The number of the rank that failed first; None: no rank has failed."""
        rank = self._shared.aborted
        return None if rank < 0 else rank

    @property
    def cause(self) -> str:
        """See Failing."""
        return self._shared.cause


class SharedMemoryLink:
    """A Link between two ranks of one machine: a group of sender and receiver in which only the sender has columns.

    The sender waits for the receiver. With as many batches in flight as stages, this costs no time: the receiver has
    finished the batch before.
    """

    def __init__(self, pair: SharedMemoryGroup) -> None:
        self._pair = pair

    @property
    def waited_seconds(self) -> float:
        return self._pair.waited_seconds

    def send(self, rows_TD: Tensor) -> None:
        self._pair.gather_to(1, rows_TD, (rows_TD.shape[1], 0))

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._pair.gather_to(1, torch.empty((num_rows, 0), dtype=dtype), (width, 0))

    def send_back(self, rows_TD: Tensor) -> None:
        self._pair.gather_to(0, rows_TD, (0, rows_TD.shape[1]))

    def receive_back(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._pair.gather_to(0, torch.empty((num_rows, 0), dtype=dtype), (0, width))

    def close(self) -> None:
        """There is nothing to close: the system frees the memory with its last owner."""
