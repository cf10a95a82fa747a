"""The collective operations of ranks that share one model. A rank computes everything else alone.

The ranks of a stage gather columns: every rank has some columns, and all ranks, or only the first one, get all columns.
Nothing is summed over ranks. So a result has the same bits as if one rank had computed everything. Partial results of
attention over a shared KV cache are joined in an order that does not depend on the ranks.

Dimensions: T rows, N columns of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from quire import extension
from quire.distributed.layout import Grid
from quire.distributed.whereabouts import Whereabouts
from quire.errors import EngineDeadError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.forward_batch import ForwardBatch, LayerCache
    from quire.kernels.layer_rules import AttentionRule

GroupError = extension.GroupError  # another rank has failed, is late or has called another method: the group is broken
RankLate = extension.RankLate  # a GroupError: another rank is late
StepVoid = extension.StepVoid  # another rank has left the step: all ranks leave it, and go on with the next step
# Causes for Failing.fail_for: the connection to the rank was closed; it has sent something that no rank sends; its
# process was stopped by a signal.
CLOSED, NONSENSE, STOPPED = extension.CLOSED, extension.NONSENSE, extension.STOPPED


class AgreedError(Exception):
    """An error with which a rank leaves a step, while no rank of another stage waits for it. See its cause."""


class Steps(Protocol):
    """Ranks that take the same steps in the same order."""

    @property
    def waited_seconds(self) -> float:
        """The seconds that this rank has waited for other ranks so far."""
        ...

    @property
    def is_committed(self) -> bool:
        """Whether this rank has launched work of this step that needs other ranks. Then it cannot leave the step."""
        ...

    @property
    def do_hosts_agree(self) -> bool:
        """Whether the hosts of all stages agree on each step before any rank depends on another one."""
        ...

    def check(self) -> None:
        """Raise GroupError if a rank has failed. On a device, work that was launched may have no valid result then."""
        ...

    def begin_step(self) -> None:
        """Begin a step, before its first collective operation."""
        ...

    def end_step(self) -> None:
        """End a step, after its last collective operation."""
        ...

    def void_step(self) -> None:
        """Tell the others that this rank will leave the step, without waiting. `leave_step` must follow.

        A rank of several groups needs it: while it waits in one group, the ranks of its other groups must know.
        """
        ...

    def leave_step(self) -> None:
        """Leave a step, in place of `end_step`, after an error or StepVoid. Waits until all ranks have left the step.

        A rank that has ended the step already does not learn of this. Raises GroupError.
        """
        ...

    def close(self) -> None:
        """Take no more steps."""
        ...


class Gathering(Protocol):
    """Ranks that join columns. All of them must call `gather` in the same order, with the same shapes."""

    rank: int
    size: int

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Gather the columns of all ranks, side by side: [T, N], in new memory.

        Args:
            part: the columns of this rank, [T, widths[rank]]. Rows may be strided.
            widths: the number of columns of each rank.

        Raises:
            GroupError: another rank has failed or is late. It comes within two seconds after a failure.
            StepVoid: another rank has left the step.
        """
        ...


class Group(Gathering, Protocol):
    """The ranks that share a stage. All of them must call the same methods in the same order, with the same shapes."""

    def gather_to_first(self, part: Tensor, widths: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Like `gather`, but only the first rank gets the columns. Other ranks get [T, 0].

        Args:
            out: memory for the result on the first rank. `part` may lie in its own place of `out` already.
        """
        ...

    def gather_rows(self, part: Tensor, widths: Sequence[int], owners_T: Tensor) -> Tensor:
        """Like `gather`, but each rank gets only some rows, in their order. The next call overwrites the result.

        Args:
            owners_T: for each row, the rank that gets it, int32. It must be equal on all ranks.
        """
        ...

    def exchange(
        self,
        rows_PN: Tensor,
        begins: Tensor,
        firsts: Sequence[int],
        columns: Sequence[range],
        num_rows: int | None = None,
    ) -> Tensor:
        """Get some columns of the rows of all ranks: [P, C], in new memory. Each rank has all columns of its own rows.

        Args:
            rows_PN: the rows of this rank: rank r has rows begins[firsts[r]] to begins[firsts[r + 1]] of P rows.
            begins: int32, ascending from 0 to P. It must be equal on all ranks.
            firsts: for each rank, the index of its first entry of `begins`.
            columns: for each rank, the columns that it gets. This rank gets C columns.
            num_rows: P, if `rows_PN` has only the rows of this rank; None: `rows_PN` has P rows, and this rank has
                filled its own.

        Raises the errors of `gather`.
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
        """Compute attention over a KV cache that neighbouring ranks share: [T, own heads, V] in q's dtype.

        Each rank computes partial results over the ranges of keys in its own pages. Then it joins the partial results
        of its own heads.

        Args:
            q_THE: the queries of all heads of these neighbours, side by side.
            cache: the pages of this rank. A block holds whole ranges.
            batch: its block tables name the pages of all owners: see layout.PageShare.
            heads: the number of query heads of each rank of the group. All groups of neighbours have the same sum.
            num_owners: the number of neighbours that share the cache.
            sinks_H: the sinks of this rank's heads; None: heads have no sinks.

        Raises the errors of `gather`.
        """
        ...

    def agree(self) -> None:
        """Wait until all ranks can launch the collective operations of this step. Each of these operations does it too.

        A captured step must do it before it is repeated. On a CPU there is nothing to do: operations are not launched
        ahead. Raises the errors of `gather`.
        """
        ...


class Link(Protocol):
    """The link from a rank of a stage to a rank of the next stage. Rows arrive in the order in which they are sent.

    Rows may also come back. Both ranks call the methods for both directions in one order.
    """

    @property
    def waited_seconds(self) -> float:
        """The seconds that this rank has waited for the other rank so far."""
        ...

    def send(self, rows_TD: Tensor) -> None:
        """Send rows. It may return before they are received. Raises GroupError and StepVoid: see Group.gather."""
        ...

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Get the next rows: [num_rows, width] of `dtype`, in new memory. Raises GroupError and StepVoid.

        On a device, the device waits for them, and the host does not.
        """
        ...

    def send_back(self, rows_TD: Tensor) -> None:
        """Send rows from the later stage to the earlier one: like `send`, but the rows are on the host."""
        ...

    def receive_back(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Get the next rows that come back: see `receive`."""
        ...

    def close(self) -> None:
        """Close the link. Nothing is sent or received any more."""
        ...


class Failing(Protocol):
    """Tells ranks that one of them has failed. A rank has one, whichever groups it is in."""

    def fail_for(self, rank: int, reason: EngineDeadError | None = None, cause: int = 0) -> None:
        """Tell all ranks that `rank` cannot go on. Then the others cannot go on either.

        Args:
            reason: why this rank cannot go on, if it is `rank`; None: another rank is the reason.
            cause: what others see of it: CLOSED, NONSENSE, STOPPED, or the number of errno with which its connection
                has failed; 0: they do not see anything.
        """
        ...

    @property
    def own_reason(self) -> EngineDeadError | None:
        """The first reason that was given; None: none was given."""
        ...

    @property
    def failed_rank(self) -> int | None:
        """The first rank that could not go on, as far as this machine knows; None: no rank has failed."""
        ...

    @property
    def cause(self) -> str:
        """What others have seen of that rank's failure, as text for people; empty: nothing."""
        ...


@dataclass(frozen=True)
class Ranks:
    """One rank's connections to the other ranks.

    Attributes:
        grid: the places of all ranks.
        rank: the number of this rank among all ranks.
        failing: tells all ranks that one of them has failed, and keeps why this one has.
        whereabouts: the progress of the ranks on this machine.
        timeout_seconds: the longest wait for another rank.
        group: the ranks that share this rank's stage or lane, perhaps on several machines; None: this rank has the
            stage or lane alone.
        everyone: the ranks of all lanes, which share experts; None: there are no lanes.
        hosts: all ranks of this machine, whose hosts agree if they compute on GPUs; None: there is one rank here,
            or more than MOST_RANKS.
        steps: the ranks with which this rank takes its steps.
        before: the link that brings the input; None: this is the first stage.
        behind: the link that takes the output; None: this is the last stage.
    """

    rank: int
    grid: Grid
    failing: Failing
    whereabouts: Whereabouts
    timeout_seconds: float
    group: Group | None = None
    before: Link | None = None
    behind: Link | None = None
    everyone: Group | None = None
    hosts: Group | None = None
    steps: tuple[Steps, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether this rank samples: the first rank of each lane or of the last stage does. Others learn the tokens."""
        return self.behind is None and self.grid.place(self.rank) == 0

    def fail(self, reason: EngineDeadError | None = None) -> None:
        """Tell all ranks that this rank cannot go on. Then the others cannot go on either.

        Args:
            reason: for errors in other work of this rank; None: another rank is the reason.
        """
        self.failing.fail_for(self.rank, reason)

    @property
    def own_failure(self) -> EngineDeadError | None:
        """Why this rank has failed; None: it has not, or because another rank has."""
        return self.failing.own_reason

    @property
    def is_committed(self) -> bool:
        """See Steps."""
        return any(steps.is_committed for steps in self.steps)

    @property
    def do_hosts_agree(self) -> bool:
        """See Steps."""
        return any(steps.do_hosts_agree for steps in self.steps)

    def check(self) -> None:
        """See Steps."""
        for steps in self.steps:
            steps.check()

    def begin_step(self) -> None:
        """Begin a step, before anything else in it."""
        self.whereabouts.begin_step()
        for steps in self.steps:
            steps.begin_step()

    def end_step(self) -> None:
        """End a step, after its last collective operation."""
        for steps in self.steps:
            steps.end_step()
        self.whereabouts.end_step()

    def leave_step(self) -> None:
        """Leave a step, in place of `end_step`: see Steps.leave_step. Raises GroupError."""
        # All groups are told first. Otherwise this rank would wait in one group for a rank that waits for this rank in
        # another group.
        for steps in self.steps:
            steps.void_step()
        for steps in self.steps:
            steps.leave_step()
        self.whereabouts.end_step()

    def of_stage(self) -> Ranks:
        """The ranks that share this rank's stage, for a model that the stage has as a whole."""
        return replace(self, before=None, behind=None)

    @property
    def waited_seconds(self) -> float:
        """The seconds that this rank has waited for other ranks so far."""
        return sum(each.waited_seconds for each in (*self.steps, self.before, self.behind) if each is not None)

    def close(self) -> None:
        """Leave the groups, and close the links to other ranks."""
        for each in (*self.steps, self.before, self.behind):
            if each is not None:
                each.close()
