"""The progress of the ranks of a machine in their steps. A rank that has waited too long can name the late rank."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from quire import extension


class Place(NamedTuple):
    """The progress of a rank.

    Attributes:
        pid: the id of its process; 0: it is on another machine, or it has not come yet.
        begun: the number of its last step, from 1 on; 0: it has begun no step.
        ended: the number of the last step that it has ended or left.
        turns: the number of exchanges that it has reached since its last step began.
        awaited: the rank for which it waits; -1: it waits for none.
    """

    pid: int
    begun: int
    ended: int
    turns: int
    awaited: int


class Whereabouts:
    """Reports the progress of this rank, and shows the progress of all ranks of its machine. Any thread may read it.

    Args:
        memory: the file descriptor from shared_memory.make_memory.
        rank: the rank of this process.
        others: the ranks of this machine.
        hosts: the addresses of ranks of other machines, as far as they are known.
    """

    def __init__(
        self, memory: int, rank: int, others: Sequence[int], hosts: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self._rank, self._others, self._hosts = rank, others, hosts
        extension.require("A model that ranks share")
        self._shared = extension.C.Whereabouts(memory, rank)

    def begin_step(self) -> None:
        self._shared.begin_step()

    def end_step(self) -> None:
        """Note that this rank has ended or left the step."""
        self._shared.end_step()

    def wait_for(self, rank: int | None) -> None:
        """Note that this rank waits for a rank of another machine; None: it waits no more.

        For ranks of this machine, the groups note it themselves.
        """
        self._shared.wait_for(-1 if rank is None else rank)

    def all(self) -> tuple[Place, ...]:
        """The progress of all ranks of this machine. It changes as long as any of them makes progress."""
        return tuple(self._of(rank) for rank in self._others)

    def _of(self, rank: int) -> Place:
        return Place(*self._shared.of(rank))

    def late(self, pending: Sequence[int]) -> dict[int, str]:
        """The ranks for which others wait, and what each of them is doing.

        Args:
            pending: the ranks that have not ended their work.
        """
        here = [rank for rank in pending if rank in self._others]
        to_blame = sorted({self._last(rank) for rank in here or pending})
        return {rank: self.doing(rank) for rank in to_blame}

    def _last(self, rank: int) -> int:
        """The last rank of a chain of waiting ranks. It waits for nobody, or for a rank that the chain has already."""
        seen: set[int] = set()
        while rank in self._others and rank not in seen and (awaited := self._of(rank).awaited) >= 0:
            seen.add(rank)
            rank = awaited
        return rank

    def name(self, rank: int) -> str:
        """The place of the rank's process, as text for people."""
        pid = self._of(rank).pid if rank in self._others else 0
        return f"process {pid} on {platform.node()}" if pid else f"on {self._hosts.get(rank, 'another machine')}"

    def neighbours(self) -> dict[int, int]:
        """The ids of the processes of the other ranks of this machine, by rank, as far as they have come."""
        return {rank: pid for rank in self._others if rank != self._rank and (pid := self._of(rank).pid)}

    def doing(self, rank: int) -> str:
        """What the rank is doing, as text for people."""
        if rank not in self._others:
            is_awaited = any(each.awaited == rank for each in self.all())
            return "has sent nothing" if is_awaited else "does not answer"
        newest, place = max(each.begun for each in self.all()), self._of(rank)
        if not newest:
            return f"is in its start, after {_exchanges(place.turns)}"
        if place.begun != place.ended:
            return f"is in step {place.begun}, after {_exchanges(place.turns)}"
        if place.begun < newest:
            return f"has not begun step {newest}"
        return f"has computed step {newest}, and does not answer"


def _exchanges(count: int) -> str:
    return f"{count} exchange{'s' * (count != 1)}"
