"""A proposer that knows the answers and is right at random: its proposals must not change the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from quire.request import Request


class Guesser:
    """Drafts of 0 to `longest` tokens. Each is right with probability `right`.

    Where a request ends before its drafts do, they are anything.

    Attributes:
        forgotten: ids of requests that have ended.
    """

    def __init__(self, right: float, longest: int = 6, seed: int = 0, vocab_size: int = 50) -> None:
        self.continuation_of: Callable[[str], Sequence[int]] = lambda request_id: ()
        self.right, self.longest, self.vocab_size = right, longest, vocab_size
        self.num_right = self.num_wrong = 0
        self.forgotten: list[str] = []
        self._random = Random(seed)

    def propose(self, request: Request, most: int) -> list[int]:
        rest = list(self.continuation_of(request.request_id)[len(request.output_token_ids) :])
        drafts = []
        for index in range(self._random.randint(0, min(most, self.longest))):
            token_id = rest[index] if index < len(rest) else self._random.randrange(self.vocab_size)
            is_right = self._random.random() < self.right
            self.num_right += is_right
            self.num_wrong += not is_right
            drafts.append(token_id if is_right else (token_id + 1) % self.vocab_size)
        return drafts

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)
