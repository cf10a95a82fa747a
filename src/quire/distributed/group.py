"""What ranks that share one model do together. Everything else a rank computes alone.

One operation is enough: every rank has some columns, and all ranks, or the first one, get all of them. Nothing is added
up on the way, so a joined result has the bits of one rank that computes everything.
Dimensions: T rows, N columns of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.kernels import cpu

GroupError = cpu.GroupError  # another rank has failed, is late, or does something else: the group cannot go on


class AgreedError(Exception):
    """All ranks know that this step has failed, and go on with the next one. The cause is the error."""


class Group(Protocol):
    """The ranks. All of them call the same methods in the same order, with the same widths and number of rows."""

    rank: int
    size: int

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks side by side, [T, N], in memory of its own.

        Args:
            part: [T, widths[rank]]; rows may be strided.

        Raises GroupError, within two seconds after another rank has failed.
        """
        ...

    def gather_to_first(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """The same for the first rank alone; others get [T, 0]."""
        ...

    def fail(self) -> None:
        """This rank cannot go on. Nor can the others."""
        ...
