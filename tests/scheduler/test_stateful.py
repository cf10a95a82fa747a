"""Random histories: adds, forks, aborts, priorities, preemptions, failures and moving limits, with tiny pools."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.formats.kv_groups import KvGroup, pages_for
from quire.layer_spec.kv_spec import KvKind, KvSpec
from quire.messages import SetLimits
from quire.schedule import RowsFailedError, ScheduledBatch
from tests.examples import examples
from tests.guesser import Guesser
from tests.scheduler.driver import Compilation, Driver, expected, request

# Few different tokens and lengths, so that prefixes collide.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
MAX_MODEL_LEN = 30
BLOCK_SIZES = (1, 2, 3, 4, 8)
MOST_STEP_TOKENS = 16


def group(kind: KvKind, window: int = 0, num_tables: int = 1) -> KvGroup:
    spec = KvSpec(kind=kind, num_kv_heads=1, head_dim_k=1, head_dim_v=1, window=window)
    return KvGroup(spec, tuple(range(num_tables)), 1)


MODELS = (
    (group("full"),),
    (group("window", 5),),
    (group("window", 3, 2), group("full")),
    (group("latent", num_tables=2), group("chunked", 6)),
    (group("chunked", 4), group("window", 9)),
    (group("state", num_tables=2), group("full"), group("window", 2)),
    (group("state"),),
)


class Histories(RuleBasedStateMachine):
    """Any history keeps the invariants of Driver.check, and every request that is not aborted gets its own tokens."""

    @initialize(
        block_size=st.sampled_from(BLOCK_SIZES),
        spare_blocks=st.integers(0, 12),
        depth=st.integers(1, 3),
        has_stages=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        chunked=st.booleans(),
        caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.3, 0.9]),
        shared=st.sampled_from([0, 1, 2, 5, 16]),
        right=st.sampled_from([None, 0.0, 0.7, 1.0]),
        forcing=st.sampled_from([0, 0, 10, 25, 40]),
        groups=st.sampled_from(MODELS),
    )
    def start(
        self,
        block_size,
        spare_blocks,
        depth,
        has_stages,
        policy,
        chunked,
        caching,
        watermark,
        shared,
        right,
        forcing,
        groups,
    ) -> None:  # type: ignore[no-untyped-def]
        self.next_failure: Exception | None = None
        self.is_failure_late = False
        self.bad_rows: set[str] = set()
        self.failed_rows: set[str] = set()
        self.driver = Driver(
            num_blocks=pages_for(groups, MAX_MODEL_LEN, block_size, depth * MOST_STEP_TOKENS) + spare_blocks,
            block_size=block_size,
            max_num_seqs=4,
            max_num_batched_tokens=MOST_STEP_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
            watermark=watermark,
            max_shared_prefill_tokens=shared,
            depth=depth,
            num_stages=depth if has_stages else 1,
            groups=groups,
            # what a state was before the drafts is not kept
            proposer=None if right is None or any(g.spec.kind == "state" for g in groups) else Guesser(right),
            failure=self.take_failure,
            row_failure=lambda request_id: "bad row" if request_id in self.bad_rows else None,
            forces=lambda token_id: token_id % 50 < forcing,
        )
        self.aborted: set[str] = set()

    def take_failure(self, batch: ScheduledBatch, is_computed: bool) -> Exception | None:
        if is_computed != self.is_failure_late:
            return None
        error, self.next_failure = self.next_failure, None
        if isinstance(error, RowsFailedError):
            error.request_ids = batch.request_ids[-1:]
        if error is not None:
            self.failed_rows.update(error.request_ids if isinstance(error, RowsFailedError) else batch.request_ids)
        return error

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        seed=st.integers(0, 3),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "s"]),
        lora=st.sampled_from([None, None, "l"]),
        stop=st.booleans(),
        logprobs=st.booleans(),
        num_forks=st.integers(0, 3),
        delay=st.sampled_from([0, 0, 0, 2, 9]),
    )
    def add(self, prompt, max_tokens, seed, priority, salt, lora, stop, logprobs, num_forks, delay) -> None:  # type: ignore[no-untyped-def]
        parent = f"r{len(self.driver.messages)}"
        for i in range(num_forks + 1):
            self.driver.add(
                request(
                    f"r{len(self.driver.messages)}",
                    prompt,
                    max_tokens,
                    seed=seed + i,
                    priority=priority,
                    cache_salt=salt,
                    adapter=lora,
                    stop_token_ids=list(range(20)) if stop else [],
                    prompt_logprobs=1 if logprobs else None,
                    fork_of=parent if i else None,
                ),
                Compilation(delay).is_ready if delay else None,
            )

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.scheduler.num_running)
    @rule()
    def preempt(self) -> None:
        self.driver.scheduler.preempt_last()
        self.driver.check()

    @precondition(lambda self: self.driver.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from([r.request_id for r in self.driver.live()]))
        self.driver.core.abort([victim, "never seen"])
        self.aborted.add(victim)
        self.driver.check()

    @precondition(lambda self: self.driver.live())
    @rule(is_known=st.booleans(), is_late=st.booleans())
    def fail_a_step(self, is_known: bool, is_late: bool) -> None:
        self.is_failure_late = is_late
        self.next_failure = RowsFailedError([], "known") if is_known else RuntimeError("unknown")

    @precondition(lambda self: self.driver.live())
    @rule(data=st.data())
    def fail_a_row(self, data: st.DataObject) -> None:
        self.bad_rows.add(data.draw(st.sampled_from([r.request_id for r in self.driver.live()])))

    @rule(
        seqs=st.none() | st.integers(1, 6),
        budget=st.none() | st.integers(1, 40),
        chunk=st.none() | st.integers(0, 9),
        shared=st.none() | st.integers(0, 16),
    )
    def set_limits(self, seqs: int | None, budget: int | None, chunk: int | None, shared: int | None) -> None:
        self.driver.core.set_limits(SetLimits(seqs, budget, chunk, max_shared_prefill_tokens=shared))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.driver.scheduler.reset_prefix_cache()
        self.driver.check()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.run()
        for request_id, message in driver.messages.items():
            tokens, reason = expected(message)
            got = driver.tokens(request_id)
            assert got == tokens[: len(got)], f"{request_id} got wrong tokens"
            reasons = [d.finish_reason for d in driver.deltas[request_id] if d.finish_reason]
            if request_id in self.aborted and not reasons:
                continue
            assert len(reasons) == 1, f"{request_id} ended {len(reasons)} times"
            assert driver.last(request_id).finish_reason == reasons[0], f"{request_id} got something after its end"
            if reasons[0] == "error":
                assert request_id in self.bad_rows | self.failed_rows, f"{request_id} failed for another's fault"
            else:
                assert (got, reasons[0]) == (tokens, reason)
        # The worker is told of every removal: after one more request it holds only that one.
        self.next_failure = None
        driver.add(request("the last", [1], 1))
        driver.run()
        assert list(driver.executor.rows) == ["the last"], "the worker still holds finished requests"


Histories.TestCase.settings = settings(
    max_examples=examples(300), stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
