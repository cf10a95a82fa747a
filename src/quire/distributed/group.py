"""What ranks that share one model do together. Everything else a rank computes alone.

One operation is enough: every rank has some columns, and all ranks, or the first one, get all of them. Nothing is added
up on the way, so a joined result has the bits of one rank that computes everything.
Dimensions: T rows, N columns of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from quire.kernels import extension

if TYPE_CHECKING:
    from torch import Tensor

GroupError = extension.GroupError  # another rank has failed, is late, or does something else: the group cannot go on
StepVoid = extension.StepVoid  # another rank has left the step: all ranks leave it, and go on with the next one


class Group(Protocol):
    """The ranks. All of them call the same methods in the same order, with the same widths and number of rows."""

    rank: int
    size: int

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks side by side, [T, N], in memory of its own.

        Args:
            part: [T, widths[rank]]; rows may be strided.

        Raises GroupError within two seconds after another rank has failed, and StepVoid after one has left the step.
        """
        ...

    def gather_to_first(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """The same for the first rank alone; others get [T, 0]."""
        ...

    def begin_step(self) -> None:
        """Before what ranks do together in a step. All of them take the same steps in the same order."""
        ...

    def end_step(self) -> None:
        """Behind it."""
        ...

    def leave_step(self) -> None:
        """In place of `end_step`, after an error or StepVoid. Waits until no rank is in the step any more.

        A rank that has ended the step before does not learn of it. Raises GroupError.
        """
        ...

    def fail(self) -> None:
        """This rank cannot go on. Nor can the others."""
        ...
