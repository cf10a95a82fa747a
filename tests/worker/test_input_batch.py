"""InputBatch against a plain reading of ScheduledBatch: tokens, positions, slots, tables and sampling rows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.sampling.sampler import SampledTokens
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, RowsFailedError, ScheduledBatch
from quire.worker.drafts import verify
from quire.worker.input_batch import InputBatch

BLOCK_SIZE = 8
MAX_MODEL_LEN = 64


def _row(request_id: str, token_ids: list[int], num_prompt_tokens: int, block_ids: list[int]) -> NewRow:
    return NewRow(request_id, token_ids, num_prompt_tokens, SamplingParams(temperature=0.0), block_ids)


def _batch(step_id: int, rows: list[tuple[str, int, int]], **kwargs: object) -> ScheduledBatch:
    """rows: (request_id, computed, scheduled)."""
    batch = ScheduledBatch(
        step_id,
        request_ids=[row[0] for row in rows],
        num_computed_tokens=[row[1] for row in rows],
        num_scheduled_tokens=[row[2] for row in rows],
        new_block_ids=[[] for _ in rows],
    )
    for name, value in kwargs.items():
        setattr(batch, name, value)
    return batch


@pytest.mark.parametrize("seed", range(20))
def test_forward_batch_is_what_the_schedule_says(seed: int) -> None:
    rng = random.Random(seed)
    inputs = InputBatch(2, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size=100)  # has to grow
    names = [f"r{i}" for i in range(5)]
    rng.shuffle(names)
    tokens = {name: [rng.randrange(100) for _ in range(rng.randrange(1, MAX_MODEL_LEN))] for name in names}
    free = list(range(100))
    rng.shuffle(free)
    tables = {name: [free.pop() for _ in range(-(-len(tokens[name]) // BLOCK_SIZE))] for name in names}
    rows = []
    for name in names:
        computed = rng.randrange(len(tokens[name]))
        rows.append((name, computed, rng.randrange(1, len(tokens[name]) - computed + 1)))
    new_rows = [_row(name, tokens[name], len(tokens[name]), tables[name]) for name in sorted(names)]
    num_logits = [int(computed + count == len(tokens[name])) for name, computed, count in rows]
    batch = _batch(0, rows, new_rows=new_rows, num_logits=num_logits)
    inputs.apply(batch)
    step = inputs.step_rows(batch)
    staged = inputs.stage(step)
    packed = inputs.forward_batch(staged, [])

    expected = [
        (tokens[name][p], p, tables[name][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE)
        for name, computed, count in rows
        for p in range(computed, computed + count)
    ]
    (places,) = packed.tables
    actual = zip(packed.token_ids_T.tolist(), packed.positions_T.tolist(), places.slot_mapping_T.tolist(), strict=True)
    assert list(actual) == expected
    assert packed.seq_lens_S.tolist() == [computed + count for _, computed, count in rows]
    assert packed.cu_seqlens_q_S1.tolist() == [sum(r[2] for r in rows[:i]) for i in range(len(rows) + 1)]
    for (name, computed, count), table in zip(rows, places.block_tables_SM.tolist(), strict=True):
        used = -(-(computed + count) // BLOCK_SIZE)
        assert table[:used] == tables[name][:used]
    last = [sum(r[2] for r in rows[: i + 1]) - 1 for i in range(len(rows))]
    assert staged.logits_indices_R.tolist() == [last[i] for i, count in enumerate(num_logits) if count]


def test_a_sampled_token_is_the_next_steps_input() -> None:
    inputs = InputBatch(1, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size=100)
    first = _batch(0, [("a", 0, 3)], new_rows=[_row("a", [7, 8, 9], 3, [4])], num_logits=[1])
    inputs.apply(first)
    step = inputs.step_rows(first)
    expected = inputs.expect_tokens(inputs.stage(step), step, torch.tensor([55]))
    inputs.learn_tokens(expected, np.array([55]))
    batch = _batch(1, [("a", 3, 1)])
    inputs.apply(batch)
    packed = inputs.forward_batch(inputs.stage(inputs.step_rows(batch)), [])
    assert (packed.token_ids_T.tolist(), packed.tables[0].slot_mapping_T.tolist()) == ([55], [4 * BLOCK_SIZE + 3])


def test_removed_rows_are_reused_and_unknown_ids_ignored() -> None:
    inputs = InputBatch(1, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size=100)
    inputs.apply(_batch(0, [("a", 0, 1)], new_rows=[_row("a", [1], 1, [0])]))
    row = inputs.row_of["a"]
    inputs.apply(_batch(1, [("b", 0, 1)], removed_request_ids=["a", "never"], new_rows=[_row("b", [2], 1, [3])]))
    assert inputs.row_of == {"b": row}
    assert inputs.block_tables_NCM[0, row, 0] == 3


def test_a_row_that_cannot_be_added_is_named_and_can_be_removed() -> None:
    inputs = InputBatch(2, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size=100)
    poison = NewRow("poison", [1], 1, SamplingParams(temperature=1.0), [1])  # random, but without a seed
    batch = _batch(0, [("a", 0, 1), ("poison", 0, 1)], new_rows=[_row("a", [1], 1, [0]), poison])
    with pytest.raises(RowsFailedError, match="could not be prepared") as caught:
        inputs.apply(batch)
    assert caught.value.request_ids == ["poison"]
    again = _batch(1, [("a", 0, 1)], removed_request_ids=["a", "poison"], new_rows=[_row("a", [1], 1, [0])])
    inputs.apply(again)
    assert list(inputs.row_of) == ["a"]
    assert inputs.sampling.num_random == 0
    assert len(inputs._free_rows) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"wants_vector": True}, "no vector"), ({"adapter": "a"}, "The adapter 'a' is not in memory")],
    ids=str,
)
def test_what_a_worker_cannot_do_is_refused(fields: dict[str, Any], reason: str) -> None:
    inputs = InputBatch(2, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size=100)
    new = replace(_row("poison", [1], 1, [1]), **fields)
    with pytest.raises(RowsFailedError, match=reason) as caught:
        inputs.apply(_batch(0, [("poison", 0, 1)], new_rows=[new]))
    assert caught.value.request_ids == ["poison"]


def test_drafts_are_computed_behind_the_known_tokens_and_written_over() -> None:
    """Logits of the newest token and of each draft; then the tokens that came, and the slots of the drafts again."""
    inputs = InputBatch(1, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size=100)
    new_rows = [_row("a", [7, 8, 9], 3, [4]), _row("b", [1, 2], 2, [5])]
    inputs.apply(_batch(0, [], new_rows=new_rows))
    batch = _batch(1, [("a", 2, 4), ("b", 1, 1)], num_logits=[4, 1], draft_token_ids=[[20, 21, 22], ()])
    inputs.apply(batch)
    step = inputs.step_rows(batch)
    staged = inputs.stage(step)
    packed = inputs.forward_batch(staged, [])
    assert packed.token_ids_T.tolist() == [9, 20, 21, 22, 2]
    first_of_a, first_of_b = 4 * BLOCK_SIZE, 5 * BLOCK_SIZE
    assert packed.tables[0].slot_mapping_T.tolist() == [*range(first_of_a + 2, first_of_a + 6), first_of_b + 1]
    assert staged.logits_indices_R.tolist() == [0, 1, 2, 3, 4]
    sampled = SampledTokens([20, 50, 51, 52, 60])
    assert step.drafts is not None
    assert step.drafts.before() == [(), [20], [20, 21], [20, 21, 22], ()]
    expected = inputs.expect_tokens(staged, step, torch.tensor(sampled.token_ids))
    ((_, first, drafts),) = step.drafts.rows
    assert verify(sampled, first, drafts) == [20, 50]
    inputs.learn_tokens(expected, np.array([60]))
    inputs.learn_verified(expected, 0, [20, 50])
    batch = _batch(2, [("a", 4, 1), ("b", 2, 1)], num_logits=[1, 1], draft_token_ids=[(), ()])
    inputs.apply(batch)
    packed = inputs.forward_batch(inputs.stage(inputs.step_rows(batch)), [])
    assert packed.token_ids_T.tolist() == [50, 60]
    assert packed.tables[0].slot_mapping_T.tolist() == [first_of_a + 4, first_of_b + 2]
    assert inputs.sampling.num_output_tokens_C[[inputs.row_of["a"], inputs.row_of["b"]]].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("failed", "token_ids"),
    [([], [3, 4, 9]), ([0, 1], []), ([1], [3]), ([2], [3, 4])],
    ids=str,
)
def test_logits_that_give_no_token_end_what_is_verified(failed: list[int], token_ids: list[int]) -> None:
    """The row fails if they are the first; otherwise in the next step, as without drafts."""
    sampled = SampledTokens([3, 4, 9], errors=dict.fromkeys(failed, "NaN"))
    assert verify(sampled, 0, [3, 4]) == token_ids


def test_prompt_logprobs_are_not_computed_again_for_a_resumed_request() -> None:
    inputs = InputBatch(2, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size=100)
    params = SamplingParams(temperature=0.0, prompt_logprobs=3)
    rows = [NewRow("new", [1, 2], 2, params, [0]), NewRow("resumed", [1, 2, 3], 2, params, [1])]
    inputs.apply(_batch(0, [("new", 0, 2), ("resumed", 0, 3)], new_rows=rows))
    assert inputs.num_prompt_logprobs == {inputs.row_of["new"]: 3}
