"""A bound on the tokens that a row may spend on reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from quire.sampling_params import SamplingParams

_ENDED = -1


class ThinkingBudget:
    """Forces the token that ends the reasoning once the budget is spent.

    Args:
        most: tokens between start and end.
        token_ids: the token that ends the reasoning, and the tokens that begin it unless the output begins inside it.
            Several tokens are the header of a message: the budget is for all such messages together.
        output_token_ids: the output so far.
    """

    def __init__(self, most: int, token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        self._end_id, *self._start_ids = token_ids
        self._state = most, 0  # tokens that are left, and how many tokens of the start have come
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
        return self._state[0] != _ENDED

    def append(self, token_id: int) -> None:
        """Record a token of the output."""
        self._state = self._state_after(self._state, token_id)

    def forced_after(self, before: Sequence[int]) -> int | None:
        """The only token that may come next; None: any. `before`: drafts that count as appended."""
        state = self._state
        for token_id in before:
            state = self._state_after(state, token_id)
        return self._end_id if state == (0, len(self._start_ids)) else None

    def _state_after(self, state: tuple[int, int], token_id: int) -> tuple[int, int]:
        left, num_begun = state
        if left == _ENDED:
            return state
        if num_begun < len(self._start_ids):
            is_next = token_id == self._start_ids[num_begun]
            return left, num_begun + 1 if is_next else int(token_id == self._start_ids[0])
        if token_id != self._end_id:
            return left - 1, num_begun
        return (left, 0) if len(self._start_ids) > 1 else (_ENDED, 0)
