"""A bound on the tokens that a row may spend on reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from quire.sampling_params import SamplingParams

_ENDED = -1


class ThinkingBudget:
    """Forces the token that ends the reasoning once the budget is spent.

    Args:
        most: tokens between start and end.
        token_ids: the token that ends the reasoning, and the token that begins it unless the output begins inside it.
        output_token_ids: the output so far.
    """

    def __init__(self, most: int, token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        self._most = most
        self._end_id, self._start_id = token_ids[0], token_ids[1] if len(token_ids) > 1 else None
        # Tokens that are left; None: the reasoning has not begun.
        self._left = most if self._start_id is None else None
        for token_id in output_token_ids:
            self.append(token_id)

    @classmethod
    def of(cls, params: SamplingParams, output_token_ids: Sequence[int]) -> ThinkingBudget | None:
        """The budget of a request, or None if it has none."""
        if params.thinking_token_budget is None:
            return None
        assert params.thinking_token_ids, "SamplingParams refuses that"
        return cls(params.thinking_token_budget, params.thinking_token_ids, output_token_ids)

    @property
    def needs_tokens(self) -> bool:
        """Whether the forced token depends on the output so far."""
        return self._left != _ENDED

    def append(self, token_id: int) -> None:
        """Record a sampled token."""
        self._left = self._left_after(self._left, token_id)

    def forced_after(self, before: Sequence[int]) -> int | None:
        """The only token that may come next; None: any. `before`: drafts that count as appended."""
        left = self._left
        for token_id in before:
            left = self._left_after(left, token_id)
        return self._end_id if left == 0 else None

    def _left_after(self, left: int | None, token_id: int) -> int | None:
        if left is None:
            return self._most if token_id == self._start_id else None
        return _ENDED if left == _ENDED or token_id == self._end_id else left - 1
