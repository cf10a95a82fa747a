"""The common operations of ranks that share one model. Everything else a rank computes alone.

The ranks of a stage join columns: every rank has some, and all ranks, or the first one, get all of them. Nothing is
added up on the way, so a joined result has the bits of one rank that computes everything. Attention over a shared KV
cache is joined in an order that does not depend on the ranks. Dimensions: T rows, N columns of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.distributed.layout import Grid
from quire.distributed.whereabouts import Whereabouts
from quire.kernels import extension

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.forward_batch import ForwardBatch, LayerCache
    from quire.kernels.layer_rules import AttentionRule

GroupError = extension.GroupError  # another rank has failed, is late, or does something else: the group cannot go on
RankLate = extension.RankLate  # a GroupError: another rank is late
StepVoid = extension.StepVoid  # another rank has left the step: all ranks leave it, and go on with the next one


class AgreedError(Exception):
    """A rank cannot end this step, and no other stage waits for it. The cause is the error."""


class Group(Protocol):
    """The ranks of a stage. All of them call the same methods in the same order, with the same widths and rows."""

    rank: int
    size: int

    @property
    def waited_seconds(self) -> float:
        """For other ranks, so far."""
        ...

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks side by side, [T, N], in memory of its own.

        Args:
            part: [T, widths[rank]]; rows may be strided.

        Raises GroupError within two seconds after another rank has failed, and StepVoid after one has left the step.
        """
        ...

    def gather_to_first(self, part: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        """The same for the first rank alone; others get [T, 0].

        Args:
            out: takes the result, on the first rank. `part` may lie in it already.
        """
        ...

    def gather_rows(self, part: Tensor, widths: Sequence[int], owners_T: Tensor) -> Tensor:
        """The same for each rank of its own rows, in their order. The next call overwrites them.

        Args:
            owners_T: int32: the rank that wants the row, equal on all ranks.
        """
        ...

    def exchange(
        self, rows_PN: Tensor, begins: Tensor, firsts: Sequence[int], columns: range, num_rows: int | None = None
    ) -> Tensor:
        """Some columns of the rows of all ranks, [P, C], in memory of its own.

        Args:
            num_rows: P, if `rows_PN` has only the rows of this rank. None: it has filled its own among all rows.
            rows_PN: Rank r has rows begins[firsts[r]] to begins[firsts[r + 1]].
            begins: int32, ascending from 0 to P, and equal on all ranks.
            columns: the columns that this rank wants.

        Raises as `gather`.
        """
        ...

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
        """Attention over a cache whose pages this rank and its neighbours have together, [T, own heads, V].

        Each computes the partial results of the ranges that it has. Then it joins the partial results of its own heads.

        Args:
            q_THE: the queries of the heads of these neighbours, side by side.
            cache: the pages of this rank, in blocks of whole ranges.
            batch: its block tables name the pages of all owners: see layout.PageShare.
            heads: the number of q's heads of each rank of the group. All groups of neighbours have the same number.
            sinks_H: the sinks of this rank's heads.

        Raises as `gather`.
        """
        ...

    def begin_step(self) -> None:
        """Before what ranks do together in a step. All of them take the same steps in the same order."""
        ...

    def end_step(self) -> None:
        """Behind it."""
        ...

    def void_step(self) -> None:
        """Before `leave_step`, by a rank of several groups: it waits in one of them while others learn of it."""
        ...

    def leave_step(self) -> None:
        """In place of `end_step`, after an error or StepVoid. Waits until no rank is in the step any more.

        A rank that has ended the step before does not learn of it. Raises GroupError.
        """
        ...


class Link(Protocol):
    """From a rank of a stage to one of the next stage. Rows are received in the order in which they are sent."""

    @property
    def waited_seconds(self) -> float:
        """For the other rank, so far."""
        ...

    def send(self, rows_TD: Tensor) -> None:
        """Returns once they are received, or on their way. Raises GroupError."""
        ...

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width], in memory of its own. Raises GroupError."""
        ...

    def close(self) -> None:
        """Nothing is sent or received any more."""
        ...


class Failing(Protocol):
    """Tells ranks that one of them has failed."""

    def fail_for(self, rank: int) -> None:
        """This rank cannot go on. Nor can the others."""
        ...

    @property
    def failed_rank(self) -> int | None:
        """The first one on this machine that cannot go on."""
        ...


@dataclass(frozen=True)
class Ranks:
    """A rank's view of the others.

    Attributes:
        rank: its number among all of them.
        failing: tells all of them.
        whereabouts: the whereabouts of the ranks on its machine.
        group: the ranks that share its stage, or its lane; None: it has that alone.
        everyone: the ranks of all lanes, which share experts; None: there are no lanes.
        before: brings the input; None: it is in the first stage.
        behind: takes the output; None: it is in the last stage.
    """

    rank: int
    grid: Grid
    failing: Failing
    whereabouts: Whereabouts
    group: Group | None = None
    before: Link | None = None
    behind: Link | None = None
    everyone: Group | None = None

    @property
    def samples(self) -> bool:
        """Others learn the tokens. The first rank of each lane does, or the first one of the last stage."""
        return self.behind is None and self.grid.place(self.rank) == 0

    @property
    def groups(self) -> list[Group]:
        """Whose steps it takes."""
        return [group for group in (self.group, self.everyone) if group is not None]

    def fail(self) -> None:
        """This rank cannot go on. Nor can the others."""
        self.failing.fail_for(self.rank)

    def begin_step(self) -> None:
        """Before all that it does in a step."""
        self.whereabouts.begin_step()
        for group in self.groups:
            group.begin_step()

    def end_step(self) -> None:
        """Behind what ranks do together in it."""
        for group in self.groups:
            group.end_step()
        self.whereabouts.end_step()

    def leave_step(self) -> None:
        """In place of `end_step`. Raises GroupError."""
        # All of them first: ranks of each group may wait for this one, and the group that is left first may wait for a
        # rank that waits in another group.
        for group in self.groups:
            group.void_step()
        for group in self.groups:
            group.leave_step()
        self.whereabouts.end_step()

    @property
    def waited_seconds(self) -> float:
        """For others, so far."""
        return sum(each.waited_seconds for each in (*self.groups, self.before, self.behind) if each is not None)

    def close(self) -> None:
        """Leave the others."""
        for link in (self.before, self.behind):
            if link is not None:
                link.close()
