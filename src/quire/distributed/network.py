"""A link between ranks of two nodes, over a TCP connection.

Dimensions: T tokens, D hidden.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.distributed import wire
from quire.distributed.group import CLOSED, NONSENSE, Failing, GroupError
from quire.distributed.whereabouts import Whereabouts

NAP_SECONDS = 0.1  # seconds after which a waiting rank looks for failed ranks, as in csrc/shared_group.cpp


def cause_of(error: Exception) -> int:
    """The cause for Failing.fail_for if the connection to a rank has ended with this error."""
    if isinstance(error, wire.LengthError):
        return NONSENSE
    return getattr(error, "errno", None) or CLOSED


class SocketLink:
    """A Link over a TCP connection. Rows go as raw bytes, in their dtype.

    Args:
        peer: the connection, which is authenticated already.
        peer_rank: the rank at the other end.
        whereabouts: is told when this rank waits.
        failing: is told if the connection ends.
    """

    def __init__(self, peer: socket.socket, peer_rank: int, whereabouts: Whereabouts, failing: Failing) -> None:
        self._peer, self._rank, self._whereabouts, self._failing = peer, peer_rank, whereabouts, failing
        self.waited_seconds = 0.0

    def send(self, rows_TD: Tensor) -> None:
        rows = rows_TD.contiguous().view(torch.uint8).numpy().reshape(-1).data
        with self._waiting():  # the peer may be slow to take the rows
            wire.send(self._peer, rows, self._wait)

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        rows_TD = torch.empty((num_rows, width), dtype=dtype)
        start = time.perf_counter()
        with self._waiting():
            wire.receive_into(self._peer, rows_TD.view(torch.uint8).numpy().reshape(-1).data, self._wait)
        self.waited_seconds += time.perf_counter() - start
        return rows_TD

    send_back, receive_back = send, receive  # a connection has both directions

    def close(self) -> None:
        self._peer.close()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Note that this rank waits. Raises GroupError if the connection ends or a rank has failed."""
        self._whereabouts.wait_for(self._rank)
        try:
            yield
        except (OSError, wire.WireError) as error:
            raise self._error(error) from error
        self._whereabouts.wait_for(None)

    def _wait(self, event: int) -> None:
        """Wait until the connection takes or has bytes. Other ranks here may know before that it has none any more."""
        poll = select.poll()
        poll.register(self._peer, event)
        while not poll.poll(1000 * NAP_SECONDS):
            if self._failing.failed_rank is not None:
                raise wire.WireError("another rank has failed")

    def _error(self, error: Exception) -> Exception:
        """The error for a connection that has ended. It may have ended because another rank had failed before."""
        self._failing.fail_for(self._rank, cause=cause_of(error))
        failed, why = self._failing.failed_rank, self._failing.cause
        if failed is None or failed == self._rank:
            failed, why = self._rank, str(error)
        return GroupError(f"rank {failed} has failed{why and f': {why}'}")
