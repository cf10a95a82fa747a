"""Several schedulers of one engine, one for each lane (data parallelism with shared experts).

Each has its own requests, KV cache, prefix cache and token budget. Lanes compute side by side and share experts. So
they take their steps together, and a step takes as long as the busiest lane needs. A new request goes to the lane with
the least work; a cached prefix counts in favour of a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

from quire.errors import InvalidRequestError
from quire.messages import RequestDelta, SetLimits
from quire.request import Request
from quire.schedule import EvictedBlock, LaneUse, ScheduledBatch, StepResult
from quire.scheduler.blame import culprits
from quire.scheduler.limits import SchedulerLimits, check_queue
from quire.scheduler.scheduler import Scheduler, ScheduleStats
from quire.scheduler.speculation import DraftCounts, Speculation

PROMPT_TOKENS_OF_A_REQUEST = 512  # this number of prompt tokens to compute counts as much work as a running request


class LaneDrafts:
    """The drafts of all lanes, for an EngineCore. Each lane decides about its own."""

    def __init__(self, lanes: Sequence[Speculation]) -> None:
        self._lanes = lanes

    def drafter_seconds(self, batch: ScheduledBatch) -> float:
        """See Speculation."""
        return self.slowest_seconds(batch.lanes)

    def slowest_seconds(self, lanes: Sequence[ScheduledBatch]) -> float:
        """The time of the slowest drafter, because lanes draft side by side.

        Args:
            lanes: the batch of each lane.
        """
        return max(lane.drafter_seconds(own) for lane, own in zip(self._lanes, lanes, strict=True))

    def take_counts(self) -> DraftCounts:
        """See Speculation."""
        total = DraftCounts()
        for counts in (lane.take_counts() for lane in self._lanes):
            total.join(counts)
        return total


class Lanes:
    """Takes the place of an EngineCore's Scheduler, and has a Scheduler for each lane.

    A batch joins the batches of all lanes: see ScheduledBatch.lanes.
    """

    num_stages = 1

    def __init__(self, lanes: Sequence[Scheduler]) -> None:
        self.lanes = tuple(lanes)
        # An adapter is in the memory of all lanes or of none. So its requests take turns in all lanes together.
        self.speculation, self.adapters = LaneDrafts([lane.speculation for lane in lanes]), lanes[0].adapters
        for lane in lanes:
            lane.others = tuple(other for other in lanes if other is not lane)
            lane.arrivals, lane.adapters = lanes[0].arrivals, self.adapters
        self._next_step_id = 0

    @property
    def limits(self) -> SchedulerLimits:
        """The limits of each lane. max_num_queued_reqs is the limit of all lanes together."""
        return self.lanes[0].limits

    @property
    def num_running(self) -> int:
        return sum(lane.num_running for lane in self.lanes)

    @property
    def num_waiting(self) -> int:
        return sum(lane.num_waiting for lane in self.lanes)

    @property
    def num_deferred(self) -> int:
        return sum(lane.num_deferred for lane in self.lanes)

    @property
    def num_blocks(self) -> int:
        return sum(lane.num_blocks for lane in self.lanes)

    @property
    def num_blocks_in_use(self) -> int:
        return sum(lane.num_blocks_in_use for lane in self.lanes)

    @property
    def num_blocks_ever_used(self) -> int:
        """The blocks that were ever in use in the lane that has used the most."""
        return max(lane.num_blocks_ever_used for lane in self.lanes)

    @property
    def requests(self) -> Collection[Request]:
        """See Scheduler.requests."""
        return [*chain(*(lane.requests for lane in self.lanes))]

    def has_requests(self) -> bool:
        return any(lane.has_requests() for lane in self.lanes)

    def has_ready_requests(self) -> bool:
        return any(lane.has_ready_requests() for lane in self.lanes)

    def take_stats(self) -> ScheduleStats:
        total = ScheduleStats()
        for stats in (lane.take_stats() for lane in self.lanes):
            total.num_decode_tokens += stats.num_decode_tokens
            total.num_preemptions += stats.num_preemptions
            total.prefix_cache_queries += stats.prefix_cache_queries
            total.prefix_cache_hits += stats.prefix_cache_hits
        return total

    def take_evicted_blocks(self) -> list[EvictedBlock] | None:
        taken = [lane.take_evicted_blocks() for lane in self.lanes]
        found = [blocks for blocks in taken if blocks is not None]
        return [*chain(*found)] if found else None

    def uses(self, batch: ScheduledBatch) -> tuple[LaneUse, ...]:
        """The state of each lane after a step."""
        return tuple(
            LaneUse(own.num_tokens, lane.num_running, lane.num_waiting, lane.num_blocks_in_use)
            for lane, own in zip(self.lanes, batch.lanes, strict=True)
        )

    def add(self, request: Request, *, is_retry: bool = False, is_ready: Callable[[], bool] | None = None) -> None:
        """See Scheduler.add. The request stays in the lane that is chosen here."""
        if not is_retry:
            check_queue(self.num_waiting, self.limits)
        if any(request.request_id in lane for lane in self.lanes):
            raise InvalidRequestError("The request id is in use", value=request.request_id, param="request_id")
        self._lane_for(request).add(request, is_retry=True, is_ready=is_ready)

    def _lane_for(self, request: Request) -> Scheduler:
        if request.sampling_params.grammar is not None:  # only the rank in the engine's process has grammars
            if request.lane:
                raise InvalidRequestError(
                    "A request with a constraint is computed by the first lane",
                    value=request.lane,
                    expected="0",
                    fix="Leave data_parallel_rank out",
                    param="data_parallel_rank",
                )
            return self.lanes[0]
        if request.lane is not None:
            return self.lanes[request.lane]
        if request.fork_of is not None:
            for lane in self.lanes:
                if request.fork_of in lane:
                    return lane

        def work(lane: Scheduler) -> float:
            return lane.num_running + lane.num_waiting + lane.num_missing(request) / PROMPT_TOKENS_OF_A_REQUEST

        return min(self.lanes, key=work)

    def abort(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        for lane in self.lanes:
            lane.abort(request_ids)

    def set_limits(self, change: SetLimits) -> None:
        for lane in self.lanes:
            lane.set_limits(change)

    def reset_prefix_cache(self) -> None:
        for lane in self.lanes:
            lane.reset_prefix_cache()

    def schedule(self) -> ScheduledBatch | None:
        """The next batch of all lanes; None: no lane has anything to do before a result arrives.

        If one lane waits for its tokens, all do. Otherwise lanes would take turns, and a step would take as long for
        the rows of some of them as for those of all.
        """
        self.adapters.begin_step()
        if any(lane.waits for lane in self.lanes):
            return None
        steps = [lane.begin_lane() for lane in self.lanes]
        have_prompts = [lane.may_add_prompts(step) for lane, step in zip(self.lanes, steps, strict=True)]
        if any(have_prompts) and any(step.rows for step in steps):  # prompts of any lane hold the answers of all up
            seconds = self.speculation.slowest_seconds([step.batch for step in steps])
            for lane, step, has_prompts in zip(self.lanes, steps, have_prompts, strict=True):
                if has_prompts or step.rows:
                    lane.make_room(step, seconds)
            rooms = [step.room for step in steps]
            for index, room in enumerate(rooms):
                if room is not None:
                    others = [other for other in rooms if other is not None and other is not room]
                    room.beside(others, sum(have_prompts[index + 1 :]))
                if not have_prompts[index]:
                    steps[index].room = None  # nothing is put into it: its rows count in the rooms of the others
        return self._together([lane.end_lane(step) for lane, step in zip(self.lanes, steps, strict=True)])

    def probe(self, rows: Sequence[tuple[int, int]]) -> ScheduledBatch | None:
        """See Scheduler.probe: a step of the first lane, in which the others have no rows."""
        if self.has_requests():
            return None
        return self._together([self.lanes[0].probe(rows), *[None] * (len(self.lanes) - 1)])

    def fail_probe(self, batch: ScheduledBatch) -> None:
        self.lanes[0].fail_probe(batch.lanes[0])

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[RequestDelta]:
        deltas: list[RequestDelta] = []
        for lane, own, of_lane in zip(self.lanes, batch.lanes, result.lanes, strict=True):
            if own.request_ids:
                deltas += lane.update(own, of_lane)
        return deltas

    def fail(self, batches: list[ScheduledBatch], error: str, request_ids: Collection[str] = ()) -> list[RequestDelta]:
        """See Scheduler.fail. A step has the rows of all lanes, so a row of any lane may be to blame."""
        guilty = culprits(self.rows_of(batches[0]), request_ids)
        deltas: list[RequestDelta] = []
        for index, lane in enumerate(self.lanes):
            deltas += lane.end([request for request in guilty if request.request_id in lane], error)
            lane.void([batch.lanes[index] for batch in batches if batch.lanes[index].request_ids])
        return deltas

    def rows_of(self, batch: ScheduledBatch) -> list[Request]:
        """See Scheduler.rows_of."""
        lanes = zip(self.lanes, batch.lanes, strict=True)
        return [request for lane, own in lanes if own.request_ids for request in lane.rows_of(own)]

    def fail_waiting(self, adapter: str, error: str) -> list[RequestDelta]:
        """See Scheduler.fail_waiting."""
        return [*chain(*(lane.fail_waiting(adapter, error) for lane in self.lanes))]

    def _together(self, found: list[ScheduledBatch | None]) -> ScheduledBatch | None:
        """Join the batches of all lanes; None: no lane has a batch."""
        if not any(found):
            return None
        lanes = [batch or ScheduledBatch(self._next_step_id) for batch in found]
        for lane in lanes:
            lane.lane_tokens = [other.num_tokens for other in lanes]
        batch = ScheduledBatch(
            self._next_step_id,
            [*chain(*(lane.request_ids for lane in lanes))],
            [*chain(*(lane.num_computed_tokens for lane in lanes))],
            [*chain(*(lane.num_scheduled_tokens for lane in lanes))],
            [*chain(*(lane.num_logits for lane in lanes))],
            [*chain(*(lane.draft_token_ids for lane in lanes))],
            new_rows=[*chain(*(lane.new_rows for lane in lanes))],
            lanes=lanes,
        )
        self._next_step_id += 1
        return batch
