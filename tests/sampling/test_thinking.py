"""A thinking budget is kept to the token, with and without drafts."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.filters import RowFilter
from quire.sampling.thinking import ThinkingBudget

END, START = 1, 2
TOKENS = st.lists(st.sampled_from((0, END, START)), max_size=12)


def forced(most: int, has_start: bool, output: list[int]) -> int | None:
    """By definition."""
    if has_start:
        if START not in output:
            return None
        output = output[output.index(START) + 1 :]
    return END if len(output) == most and END not in output else None


@given(most=st.integers(0, 5), has_start=st.booleans(), output=TOKENS, appended=TOKENS, drafts=TOKENS)
def test_the_end_is_forced_behind_the_last_token(most, has_start, output, appended, drafts):
    budget = ThinkingBudget(most, [END, START] if has_start else [END], output)
    for token_id in appended:
        budget.append(token_id)
    assert budget.forced_after(drafts) == forced(most, has_start, [*output, *appended, *drafts])
    row_filter = RowFilter(None, None, None, 0, None, budget)
    allowed = {token_id for token_id in range(4) if row_filter.allows(token_id)}
    now = forced(most, has_start, [*output, *appended])
    assert allowed == ({0, 1, 2, 3} if now is None else {now})
    if not budget.needs_tokens:
        assert now is None


HEADER = [START, 3]


@given(
    most=st.integers(0, 5),
    output=st.lists(st.sampled_from((0, END, *HEADER)), max_size=24),
    drafts=st.lists(st.sampled_from((0, END, *HEADER)), max_size=8),
)
def test_messages_of_reasoning_share_a_budget(most, output, drafts):
    """Each begins behind a header. Here c and d are the header, b is the end."""
    text = "".join("abcd"[token_id] for token_id in [*output, *drafts])
    messages = re.findall("cd([^b]*)(b?)", text)
    is_open = bool(messages) and not messages[-1][1]
    is_spent = sum(len(body) for body, _ in messages) == most
    assert ThinkingBudget(most, [END, *HEADER], output).forced_after(drafts) == (END if is_open and is_spent else None)
