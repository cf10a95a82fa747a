"""An executor without a model. The next token is a hash of the tokens before it, read from a simulated KV cache."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from quire.formats.kv_groups import ONE_LAYER, KvGroup
from quire.sampling_params import SamplingParams
from quire.schedule import MAX_FORCED_TOKENS, NewRow, Pending, ScheduledBatch, StepResult, TokenLogprobs

_MASK = (1 << 61) - 1


def _mix(*values: int) -> int:
    """A 61-bit hash of integers, equal in every process: Knuth's multiplicative step modulo a Mersenne prime."""
    state = 1
    for value in values:
        state = (state * 6364136223846793005 + value + 1) % _MASK
        state ^= state >> 29
    return state


def _next_token(state: int, num_output: int, params: SamplingParams, stop_ids: frozenset[int], vocab_size: int) -> int:
    """The next token. It depends on everything that was read, and on the seed.

    Stop ids are not chosen before there are min_tokens tokens.
    """
    token = _mix(state, params.seed or 0) % vocab_size
    while num_output < params.min_tokens and token in stop_ids:
        token = (token + 1) % vocab_size
    return token


def expected_tokens(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    num_tokens: int,
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    adapter: str | None = None,
    vocab_size: int = 1000,
) -> list[int]:
    """The first `num_tokens` tokens that DeterministicExecutor gives for a prompt, computed without any cache."""
    state = zlib.crc32((adapter or "").encode())
    output: list[int] = []
    for position, token in enumerate(prompt_token_ids):
        state = _mix(state, _mix(token, position, state))
    while len(output) < num_tokens:
        output.append(_next_token(state, len(output), params, stop_token_ids, vocab_size))
        state = _mix(state, _mix(output[-1], len(prompt_token_ids) + len(output) - 1, state))
    return output


@dataclass(slots=True)
class _Row:
    """The state of a request in a worker."""

    new: NewRow
    token_ids: list[int]
    block_ids: list[int]
    states: list[int]  # the state before each token, and the state after the last token
    num_forced: int = 0  # the number of its last tokens that are forced
    corruption: int = 0  # a hash of wrong content that the row has read; 0: all content was right
    error: str | None = None  # why the row failed; batches that were submitted before this was known skip the row


@dataclass(slots=True)
class _PendingStep:
    """A step that is computed when its result is asked for, after all earlier steps."""

    executor: DeterministicExecutor
    batch: ScheduledBatch
    future: Future[StepResult] = field(default_factory=Future)

    def result(self) -> StepResult:
        self.executor.run_until(self)
        return self.future.result()


class DeterministicExecutor:
    """Runs batches like a worker, but computes with integers only.

    For each computed token, a fingerprint of (token, position, all earlier tokens) is written to its slot in each block
    table. Each next token depends on the fingerprints in the slots that layers of the table's group read. So a
    wrong block, a missing copy, and a stale or overwritten slot change the output. The right output is that of
    `expected_tokens`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KvGroup] = (ONE_LAYER,),
        *,
        vocab_size: int = 1000,
        is_delayed: bool = False,
        failure: Callable[[ScheduledBatch, bool], Exception | None] = lambda batch, is_computed: None,
        row_failure: Callable[[str], str | None] = lambda request_id: None,
        forces: Callable[[int], bool] = lambda token_id: False,
    ) -> None:
        """Make an executor with an empty cache.

        Args:
            is_delayed: whether a batch is computed when its result is asked for, and not when it is submitted.
            failure: gives an exception to raise. It is called before a batch is applied, and again when it is computed.
            row_failure: gives an error message for a request; None: the request does not fail.
            forces: whether a token alone decides which token follows it, as a grammar may do.
        """
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.rows: dict[str, _Row] = {}
        self.is_shut_down = False
        self._columns = [group for group in groups for _ in group.tables()]
        self._slots = [0] * (num_blocks * block_size)
        self._is_delayed = is_delayed
        self._failure, self._row_failure, self._forces = failure, row_failure, forces
        self._waiting: deque[_PendingStep] = deque()

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        pending = _PendingStep(self, batch)
        self._waiting.append(pending)
        if not self._is_delayed:
            self.run_until(pending)
        return pending

    def shutdown(self) -> None:
        self.is_shut_down = True

    def run_until(self, pending: _PendingStep) -> None:
        """Compute the submitted batches in order, up to this one."""
        while not pending.future.done():
            step = self._waiting.popleft()
            try:
                step.future.set_result(self._execute(step.batch))
            except Exception as error:  # result() raises it, as with any executor
                step.future.set_exception(error)

    def _execute(self, batch: ScheduledBatch) -> StepResult:
        self._raise_failure(batch, is_computed=False)
        self._apply(batch)
        result = StepResult(batch.step_id, [])
        for row in range(len(batch.request_ids)):  # as in a layer, the keys of all rows are written before any is read
            self._write(batch, row, result)
        for row in range(len(batch.request_ids)):
            self._compute(batch, row, result)
        self._raise_failure(batch, is_computed=True)
        return result

    def _raise_failure(self, batch: ScheduledBatch, *, is_computed: bool) -> None:
        if (error := self._failure(batch, is_computed)) is not None:
            raise error

    def _apply(self, batch: ScheduledBatch) -> None:
        """Apply a batch in the order of a worker: removals, new rows, new blocks, copies."""
        for request_id in batch.removed_request_ids:
            self.rows.pop(request_id, None)
        for new in batch.new_rows:
            assert new.request_id not in self.rows, f"{new.request_id} is added twice"
            state = zlib.crc32((new.adapter or "").encode())
            self.rows[new.request_id] = _Row(new, list(new.token_ids), list(new.block_ids), [state])
        for request_id, block_ids in zip(batch.request_ids, batch.new_block_ids, strict=True):
            self.rows[request_id].block_ids += block_ids

        size = self.block_size
        for source, destination in batch.block_copies:
            self._slots[destination * size : (destination + 1) * size] = self._slots[
                source * size : (source + 1) * size
            ]

    def _write(self, batch: ScheduledBatch, index: int, result: StepResult) -> None:
        """Write the fingerprints of one row's new tokens."""
        row = self.rows[batch.request_ids[index]]
        result.token_ids.append([])
        row.error = row.error or self._row_failure(row.new.request_id)
        if row.error is not None:
            result.errors[index] = row.error
            return
        start = batch.num_computed_tokens[index]
        end = start + batch.num_scheduled_tokens[index]
        drafts, num_logits, name = batch.draft_token_ids[index], batch.num_logits[index], row.new.request_id
        token_ids = [*row.token_ids, *drafts]
        assert start < end <= len(token_ids), f"{name}: tokens {start} .. {end} of {len(token_ids)}"
        if not (num_logits == 1 and len(token_ids) - row.num_forced <= end < len(token_ids)):  # it knows the token
            assert num_logits == (len(drafts) + 1 if end == len(token_ids) else 0), f"{name}: {num_logits} logits"
        for position in range(len(row.states) - 1, end):
            state = row.states[position]
            row.states.append(_mix(state, _mix(token_ids[position], position, state)))
        for column, group in enumerate(self._columns):
            if group.spec.kind == "state":
                slot = row.block_ids[column] * self.block_size
                if start > 0:
                    self._read(row, slot, row.states[start])
                self._slots[slot] = row.states[end] ^ row.corruption
                continue
            for position in range(start, end):
                self._slots[self._slot(row, column, position)] = row.states[position + 1] ^ row.corruption

    def _compute(self, batch: ScheduledBatch, index: int, result: StepResult) -> None:
        """Compute one row: read what its tokens see, and sample after its tokens and after the drafts that hold."""
        row = self.rows[batch.request_ids[index]]
        new, params = row.new, row.new.sampling_params
        if row.error is not None:
            return
        start = batch.num_computed_tokens[index]
        end = start + batch.num_scheduled_tokens[index]
        for column, group in enumerate(self._columns):
            if group.spec.kind != "state":
                for position in range(group.first_needed(start), end):
                    self._read(row, self._slot(row, column, position), row.states[position + 1])
        if params.prompt_logprobs is not None and len(new.token_ids) == new.num_prompt_tokens:
            for position in range(start, min(end, new.num_prompt_tokens - 1)):
                state = row.states[position + 1] ^ row.corruption
                logprobs = _logprobs(row.token_ids[position + 1], state, params.prompt_logprobs)
                result.prompt_logprobs.setdefault(index, []).append(logprobs)
        token_ids = [*row.token_ids, *batch.draft_token_ids[index]]
        for position in range(end - batch.num_logits[index], end):
            state = row.states[position + 1] ^ row.corruption
            if new.wants_vector:
                result.vectors[index] = [state / _MASK]
            elif row.token_ids == token_ids[: position + 1]:  # the drafts so far are accepted
                num_output = position + 1 - new.num_prompt_tokens
                token = _next_token(state, num_output, params, new.stop_token_ids, self.vocab_size)
                row.token_ids.append(token)
                result.token_ids[index].append(token)
                if params.logprobs is not None:
                    result.logprobs.setdefault(index, []).append(_logprobs(token, state, params.logprobs))
        del row.states[len(row.token_ids) + new.wants_vector :]  # the states of drafts that were not accepted
        if result.token_ids[index] and params.logprobs is None:
            self._force(row, index, result)

    def _force(self, row: _Row, index: int, result: StepResult) -> None:
        """Take in the forced tokens of a row."""
        new, position, forced = row.new, len(row.token_ids) - 1, list[int]()
        state = row.states[position]
        while len(forced) < MAX_FORCED_TOKENS and self._forces(token := row.token_ids[-1]):
            state = _mix(state, _mix(token, position, state))
            position += 1
            num_output = position - new.num_prompt_tokens
            forced.append(_next_token(state, num_output, new.sampling_params, new.stop_token_ids, self.vocab_size))
            row.token_ids.append(forced[-1])
        row.num_forced = len(forced)
        if forced:
            result.forced[index] = forced

    def _read(self, row: _Row, slot: int, expected: int) -> None:
        """Read a slot. If it has other content than the row expects, all later results of the row change."""
        if (found := self._slots[slot]) != expected:
            row.corruption = _mix(row.corruption, found)

    def _slot(self, row: _Row, column: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        page = row.block_ids[block * len(self._columns) + column]
        assert page >= 0, f"{row.new.request_id}: position {position} is in no page of table {column}"
        return page * self.block_size + offset


def _logprobs(token: int, state: int, count: int) -> TokenLogprobs:
    """Invented logprobs of the token and of `count` others. They are a function of the content that was read."""
    others = [_mix(state, rank) % 1000 for rank in range(count)]
    return TokenLogprobs([token, *others], [-(state % 1000) / 100] * (count + 1), [1, *range(1, count + 1)])
