"""Runs one step on the device: rows -> forward pass -> logits -> sampled tokens and logprobs.

A step is launched without waiting for it. Its result is taken in when somebody asks for it. On a CPU, a step is
computed when its launch returns.

Dimensions: T tokens, S rows, R rows of logits, X prompt positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.distributed.group import Ranks
from quire.formats.kv_groups import kv_groups, pages_alone
from quire.forward_batch import LaneRows
from quire.kernels import gpu
from quire.models.decoder import Decoder
from quire.models.registry import CausalLM
from quire.sampling.following import SharedSampler
from quire.sampling.grammars import GrammarMasks
from quire.sampling.logprobs import entries, scores
from quire.sampling.sampler import LaunchedTokens, SampledTokens, Sampler
from quire.sampling.sharded import ShardedSampler
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch, StepResult, StepTokens
from quire.worker.accelerator import Device, Download, device_failed
from quire.worker.captured_steps import CapturedSteps
from quire.worker.drafter import Drafter
from quire.worker.drafting import Drafting, DraftsOfLastStage
from quire.worker.drafts import Drafts, Verify, verify
from quire.worker.expert_balancer import ExpertBalancer
from quire.worker.expert_use import ExpertCounter
from quire.worker.forward_pass import ForwardPass
from quire.worker.input_batch import ExpectedTokens, InputBatch, StagedStep, StepRows
from quire.worker.kv_cache import PagedCache
from quire.worker.target_streams import TargetStreams

# The most prompt positions that get logits at once. It limits the scratch memory [X, V], float32: 64 x 152k x 4 bytes
# are 39 MB.
PROMPT_LOGPROBS_CHUNK = 64


@dataclass(slots=True)
class _PromptPiece:
    """The logprobs of some prompt tokens of one row, on their way to the host."""

    position: int  # the position of the row in the batch
    next_token_ids: Tensor  # on the host
    numbers: list[Tensor]


@dataclass(slots=True)
class _Launched:
    """The results of a step on the device, and the rows that they belong to."""

    sampling: list[int] = field(default_factory=list)  # positions in the batch of the rows of logits
    rows: list[int] = field(default_factory=list)  # indices of these rows in the persistent arrays
    drafts: Drafts | None = None
    before: Sequence[Sequence[int]] = ()  # for each row of logits, the drafts before its token; empty: no drafts
    expected: ExpectedTokens | None = None
    tokens: LaunchedTokens | None = None
    pieces: list[_PromptPiece] = field(default_factory=list)

    @classmethod
    def of(cls, step: StepRows) -> _Launched:
        """A step without results yet."""
        before = () if step.drafts is None else step.drafts.before()
        return cls(step.sampling_R.tolist(), step.rows_S[step.sampling_R].tolist(), step.drafts, before)

    def tensors(self) -> list[Tensor]:
        tensors = [] if self.tokens is None else self.tokens.tensors()
        return tensors + [number for piece in self.pieces for number in piece.numbers]


class PendingStep:
    """A launched step, whose result can be asked for."""

    def __init__(
        self,
        runner: ModelRunner,
        step_result: StepResult,
        launched: _Launched,
        download: Download,
        marks: tuple[Any, Any, Any],
    ) -> None:
        self._runner = runner
        self.step_result, self.launched, self.download = step_result, launched, download
        self.marks = marks  # the marks before the forward pass, after it, and after sampling
        self.is_done = False
        self.error: Exception | None = None

    def is_computed(self) -> bool:
        """Whether the device has computed this step, or has failed: `result` does not wait for it."""
        return self.is_done or self.download.is_done()

    def result(self) -> StepResult:
        """Wait for this step and for all earlier steps. Raises EngineDeadError if the device has failed."""
        self._runner.finish_until(self)
        if self.error is not None:
            raise self.error
        return self.step_result


class ModelRunner:
    """Launches one ScheduledBatch after the other. On a device that runs ahead, any number of steps may be in flight.

    The device works in the order of the launches. So a block may go to another request as soon as the host knows that
    its owner has ended. A step in flight may still write to the block, but the step of the new owner comes later.

    Args:
        captured: forward passes that are repeated instead of run; None: every kernel is launched by itself.
        drafter: makes the drafts that a batch leaves to the worker; None: no batch does so.
        experts: counts the tokens of experts, on a CPU; None: they are not counted.
        ranks: the ranks that share the model; None: there is one rank.
        balancer: moves experts between ranks; None: experts do not move.
        shards_sampling: whether each rank samples some rows. If not, the first rank samples all rows.
        streams: see ForwardPass.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: PagedCache,
        input_batch: InputBatch,
        logprobs_mode: str,
        device: Device,
        captured: CapturedSteps | None = None,
        drafter: Drafter | None = None,
        *,
        experts: ExpertCounter | None = None,
        ranks: Ranks | None = None,
        balancer: ExpertBalancer | None = None,
        shards_sampling: bool = False,
        streams: TargetStreams | None = None,
    ) -> None:
        self.model, self.balancer = model, balancer
        self._experts = experts
        self.cache = cache
        self.input_batch = input_batch
        self._group = None if ranks is None else ranks.group
        state = input_batch.sampling
        self.sampler: Sampler
        if ranks is None:
            self.sampler = Sampler(state, logprobs_mode)
        elif shards_sampling and self._group is not None:
            self.sampler = ShardedSampler(state, logprobs_mode, self._group)
        else:
            share = model.config.vocab_share if isinstance(model, Decoder) else None  # modelling code joins all logits
            self.sampler = SharedSampler(state, logprobs_mode, self._group, share)
        self._has_logits = ranks is None or ranks.samples
        self._is_last_stage = ranks is None or ranks.behind is None
        # Steps whose tokens another stage samples, oldest first: the step's number, and the places of its tokens.
        self._untold: deque[tuple[int, ExpectedTokens]] = deque()
        self.device = device
        before, behind = (None, None) if ranks is None else (ranks.before, ranks.behind)
        self.drafting: Drafting | DraftsOfLastStage | None = None
        if behind is not None:
            self.drafting = DraftsOfLastStage(input_batch, device, before, behind)
        elif drafter is not None:
            self.drafting = Drafting(
                drafter,
                input_batch,
                device,
                model.config.vocab_size,
                is_alone=self._group is None,
                learn_tokens=self._finish_all,
                before=before,
            )
        self.forward_pass = ForwardPass(model, cache.layers, input_batch, captured, before, behind, streams)
        self._in_flight: deque[PendingStep] = deque()
        self.verify: Verify = verify  # benchmarks may replace it by HoldAtRandom

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step and wait for it."""
        return self.submit(batch).result()

    def shutdown(self) -> None:
        """There is nothing to do: steps in flight end by themselves."""

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step. The result's `errors` report rows that fail; other rows are not affected.

        Raises:
            RowsFailedError: a request of the batch cannot be computed.
            EngineDeadError: the device has failed.
        """
        try:
            pending = self._launch(batch)
        except torch.OutOfMemoryError:
            raise
        except torch.AcceleratorError as error:
            raise device_failed(error) from error
        except RuntimeError:  # Triton and cuBLAS have no type of their own for a device that has failed
            self.device.synchronize()
            raise
        self._in_flight.append(pending)
        return pending

    def _join_lanes(self, batch: ScheduledBatch, lanes: LaneRows) -> PendingStep:
        """Take part in a step of other lanes. This lane has no rows, but its rank has experts for their rows."""
        assert isinstance(self.model, Decoder), "lanes share experts"
        result, start = StepResult(batch.step_id, []), self.device.mark()
        self.model.join_lanes(lanes)
        self._count_experts(result)
        end = self.device.mark()
        return PendingStep(self, result, _Launched(), self.device.download([]), (start, end, end))

    def _count_experts(self, result: StepResult) -> None:
        if self.balancer is not None:
            self.balancer.count()
        if self._experts is not None:
            result.experts = self._experts.count()

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        if not batch.request_ids and (lanes := LaneRows.of(batch.lane_tokens)) is not None:
            return self._join_lanes(batch, lanes)
        started = time.perf_counter()
        inputs, device = self.input_batch, self.device
        result = StepResult(batch.step_id, [[] for _ in batch.request_ids])
        if self._untold and batch.tokens_before:
            self._learn_tokens(batch.tokens_before)
        inputs.apply(batch)
        self.cache.copy_pages(batch.block_copies, self._group)
        if self.drafting is not None:
            batch = self.drafting.fill(batch, result)
        step = inputs.step_rows(batch)
        launched = _Launched.of(step)
        is_sampling = self._is_last_stage and bool(launched.rows)
        staged = self.forward_pass.stage(step, self._parameters(step) if is_sampling else ())
        result.prepare_seconds = time.perf_counter() - started - result.draft_seconds
        masks = None
        if inputs.sampling.grammars and not device.runs_ahead:
            self._finish_all()  # computed already: the grammars learn their tokens
            masks = self.sampler.start_masks(launched.rows, launched.before)
        start, num_captured = device.mark(), self.forward_pass.num_captured
        hidden_TD = self.forward_pass.hidden(staged)
        result.has_captured = self.forward_pass.num_captured > num_captured
        self._count_experts(result)
        if is_sampling:
            forwarded = self._launch_tokens(launched, hidden_TD, step, staged, masks)
        else:
            forwarded = device.mark()
            if launched.rows:
                unknown_R = torch.full((len(launched.rows),), -1, device=staged.expecting_rows.device)
                expected = inputs.expect_tokens(staged, step, unknown_R)
                self._untold.append((batch.step_id, expected))
        if inputs.num_prompt_logprobs and self._is_last_stage:
            launched.pieces = list(self._launch_prompt_logprobs(hidden_TD, step, staged))
        marks = (start, forwarded, device.mark())
        pending = PendingStep(self, result, launched, device.download(launched.tensors()), marks)
        if self.drafting is not None and len(step.rows_S):
            self.drafting.learn(step, result)
        return pending

    def _parameters(self, step: StepRows) -> tuple[NDArray[Any], ...]:
        offsets_R = None if step.drafts is None else step.drafts.offsets_R
        return self.sampler.host_parameters(step.rows_S[step.sampling_R], offsets_R)

    def _launch_tokens(
        self, launched: _Launched, hidden_TD: Tensor, step: StepRows, staged: StagedStep, masks: GrammarMasks | None
    ) -> Any:
        """Compute the logits of a step and sample. Returns the mark after the logits."""
        owners_R, is_joined = self.sampler.owners(launched.rows), not self.sampler.takes_parts(launched.rows)
        logits_RV = self.forward_pass.logits(staged, hidden_TD, owners_R, is_joined)
        forwarded = self.device.mark()
        if self.input_batch.sampling.needs_tokens(launched.rows):
            self._finish_all()  # the forward pass goes on meanwhile
        launched.tokens = self.sampler.launch(logits_RV, launched.rows, staged.parameters, launched.before, masks)
        launched.expected = self.input_batch.expect_tokens(staged, step, launched.tokens.token_ids_R)
        return forwarded

    def _learn_tokens(self, steps: Sequence[StepTokens]) -> None:
        """Take in tokens that another stage has sampled. If it could not sample a step, the step is void."""
        for told in steps:
            while self._untold and self._untold[0][0] <= told.step_id:
                step_id, expected = self._untold.popleft()
                if step_id == told.step_id:
                    self.input_batch.learn_step(expected, told.token_ids)

    @torch.inference_mode()
    def sequence_logits(self, token_ids: list[int], step_tokens: int) -> Iterator[Tensor]:
        """Yield logits_XV (float32) of all positions of one sequence, in order, a chunk of positions at a time.

        The next chunk may overwrite the logits. The sequence takes the first blocks of the KV cache, whoever owns them.
        So call this only while there are no requests.

        Args:
            step_tokens: the most tokens of one forward pass.
        """
        inputs = self.input_batch
        params = SamplingParams(temperature=0.0, max_tokens=1)
        config = self.model.config
        block_ids = pages_alone(kv_groups(config), len(token_ids), inputs.block_size, step_tokens)
        offset = config.rope.row_offset(len(token_ids), config.max_model_len)
        row = NewRow("sequence", token_ids, len(token_ids), params, block_ids, rope_offset=offset)
        try:
            for start in range(0, len(token_ids), step_tokens):
                length = min(step_tokens, len(token_ids) - start)
                new_rows = [row] if start == 0 else []
                batch = ScheduledBatch(0, [row.request_id], [start], [length], new_block_ids=[[]], new_rows=new_rows)
                inputs.apply(batch)
                staged = inputs.stage(inputs.step_rows(batch))
                hidden_TD = self.model.forward(inputs.forward_batch(staged, self.cache.layers))
                for hidden_XD in torch.split(hidden_TD, PROMPT_LOGPROBS_CHUNK):
                    yield self.model.compute_logits(hidden_XD)
        finally:
            inputs.apply(ScheduledBatch(0, removed_request_ids=[row.request_id]))

    def _launch_prompt_logprobs(self, hidden_TD: Tensor, step: StepRows, staged: StagedStep) -> Iterator[_PromptPiece]:
        """Compute the logprobs of the prompt tokens that follow the positions of this step."""
        inputs = self.input_batch
        ends = np.cumsum(step.lens_S)
        for position, row in enumerate(step.rows_S.tolist()):
            num_top = inputs.num_prompt_logprobs.get(row)
            if num_top is None:
                continue
            start, length = int(step.starts_S[position]), int(step.lens_S[position])
            offset = int(ends[position]) - length - start
            stop = min(start + length, int(inputs.num_prompt_tokens[row]) - 1)
            for begin in range(start, stop, PROMPT_LOGPROBS_CHUNK):
                end = min(begin + PROMPT_LOGPROBS_CHUNK, stop)
                places, slots_T = slice(offset + begin, offset + end), staged.adapter_slots_T
                slots_X = None if slots_T is None else slots_T[places]
                logits_XV = self.model.compute_logits(hidden_TD[places], slots_X)
                if not self._has_logits:
                    continue
                next_ids_X = torch.from_numpy(inputs.token_ids[row, begin + 1 : end + 1].copy())
                numbers = scores(logits_XV, gpu.place(next_ids_X, logits_XV.device), num_top, as_logits=False)
                yield _PromptPiece(position, next_ids_X, list(numbers))

    def finish_until(self, pending: PendingStep) -> None:
        """Take in the results of all steps up to this one."""
        while not pending.is_done:
            self._finish_oldest()

    def _finish_all(self) -> None:
        """Take in the results of all steps in flight."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Take in the result of the oldest step in flight."""
        pending = self._in_flight.popleft()
        pending.is_done = True
        try:
            on_host = pending.download.wait()
            self._take_in(pending.step_result, pending.launched, on_host)
            start, forwarded, sampled = pending.marks
            pending.step_result.forward_seconds = self.device.seconds_between(start, forwarded)
            pending.step_result.sample_seconds = self.device.seconds_between(forwarded, sampled)
        except Exception as error:  # the error belongs to this step, although another one may be waited for
            pending.error = error

    def _take_in(self, result: StepResult, launched: _Launched, on_host: Iterator[Tensor]) -> None:
        if launched.tokens is not None and launched.expected is not None:
            sampled, expected = launched.tokens.finish(on_host), launched.expected
            self._take_sampled(result, launched, sampled, expected)
            if launched.drafts is not None:
                self._hold_drafts(result, launched.drafts, sampled, expected)
            if self.input_batch.sampling.grammars:
                self._take_forced(result, expected)
        for piece in launched.pieces:
            numbers = (next(on_host) for _ in piece.numbers)
            result.prompt_logprobs.setdefault(piece.position, []).extend(entries(piece.next_token_ids, *numbers))

    def _take_sampled(
        self, result: StepResult, launched: _Launched, sampled: SampledTokens, expected: ExpectedTokens
    ) -> None:
        """Give each row what was sampled for it. A row with drafts also has tokens that do not hold."""
        known, drafts = expected.known(), launched.drafts
        for index, (position, token_id) in enumerate(zip(launched.sampling, sampled.token_ids, strict=True)):
            if position in known:
                continue
            if index in sampled.errors:
                if position not in result.errors and index in sampled.error_codes:
                    result.error_codes[position] = sampled.error_codes[index]
                result.errors.setdefault(position, sampled.errors[index])
            else:
                result.token_ids[position].append(token_id)
        token_ids_R = np.array(sampled.token_ids)
        self.input_batch.learn_tokens(expected, token_ids_R if drafts is None else token_ids_R[drafts.plain_R])
        for index, logprobs in sampled.logprobs.items():
            result.logprobs.setdefault(launched.sampling[index], []).append(logprobs)

    def _hold_drafts(
        self, result: StepResult, drafts: Drafts, sampled: SampledTokens, expected: ExpectedTokens
    ) -> None:
        """Leave to each row with drafts only the tokens that hold. An error after them is dropped with its token."""
        for index, (position, first, draft_token_ids) in enumerate(drafts.rows):
            token_ids = result.token_ids[position] = self.verify(sampled, first, draft_token_ids)
            self.input_batch.learn_verified(expected, index, token_ids)
            if token_ids:
                result.errors.pop(position, None)
                result.error_codes.pop(position, None)
            if position in result.logprobs:
                del result.logprobs[position][len(token_ids) :]

    def _take_forced(self, result: StepResult, expected: ExpectedTokens) -> None:
        """Take the tokens that grammars force after the new ones."""
        for position, row, occupant in expected.owners():
            if result.token_ids[position] and (forced := self.input_batch.take_forced(row, occupant)):
                result.forced[position] = forced
