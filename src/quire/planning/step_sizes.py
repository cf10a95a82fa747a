"""The default numbers of requests and tokens of a step, from the knee and from the memory. No torch.

They are at most vLLM's. With fewer tokens a step is shorter: requests wait less for a prompt's step, and the next
tokens of answers come sooner. Up to the knee hardly any throughput is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import EngineConfig
from quire.cost.devices import GIB
from quire.option import Source
from quire.planning.knee import Knee

Size = tuple[int, Source, str]  # a value, its source, and why

# vLLM's tables, `max_num_seqs / max_num_batched_tokens`, for the server, and for LLM(...): on CPU, on GPUs, and on GPUs
# with much memory.
CPU_LIMITS = (128, 2048), (256, 4096)
GPU_LIMITS = (256, 2048), (256, 8192)
LARGE_GPU_LIMITS = (1024, 8192), (1024, 16384)
LARGE_GPU_BYTES = 70 * GIB
# On a CPU, activations of longer steps leave the caches: 1.07 times the time of a prompt in bfloat16, 1.09 in int8
# (benchmarks/NOTES.md).
LONGEST_CPU_STEP = 2048
# Of the rate of endless steps.
KNEE_SHARE = 0.99
# Nobody waits for the end of a step of an offline batch, so its steps are longer. A prompt of 512 tokens in int4 takes
# 1.07 times as long in steps of 128 tokens (benchmarks/NOTES.md, 2026-11-29).
OFFLINE_KNEE_SHARE = 0.997
# While several requests are there, a step with prompts takes about this many times as long as a step of these answers
# alone. Fewer tokens would delay prompts, more would delay answers. benchmarks/defaults.py has the goodput of other
# settings.
SHARED_TIMES, SHARED_ANSWERS, SHARED_CONTEXT = 2, 8, 1024
# While prompts wait longer, a step takes more of their tokens, until answers on average have taken this many times
# their time alone: see scheduler/pace.py.
MOST_ANSWER_TIMES = 8.0
# Products of integers on a CPU, relative to products of floats: 1.75 for 2.59 ps, tests/planning/constants_0.6b.json.
INTEGER_TIMES = 1.5
SHORT_REQUEST = 256  # tokens; no more requests run than memory holds requests of this length
LEAST_REQUESTS = 8  # the requests that may always run, even with little memory
THROUGHPUT_FACTOR = 2  # on both limits, as vLLM's performance mode
# On the token budget: a long prompt then holds up the others' next token for a quarter of the time.
INTERACTIVITY_DIVISOR = 4


@dataclass(frozen=True)
class StepSizes:
    """The defaults of a start.

    Args:
        knee: None: of a GPU. No step has run on one, so vLLM's values stay.
        fitting: requests of SHORT_REQUEST tokens that memory holds.
        gpu_bytes: memory of the GPU; None: the model runs on the CPU.
    """

    config: EngineConfig
    knee: Knee | None
    fitting: int
    gpu_bytes: int | None
    is_server: bool

    def max_num_seqs(self) -> Size:
        """Requests that run at once."""
        (most, _), whose = self._vllm()
        if self.knee is None:
            return self._in_mode((most, "default", f"as {whose}"), THROUGHPUT_FACTOR)
        size = max(1 << max(self.fitting, 1).bit_length() - 1, LEAST_REQUESTS)
        why = f"memory holds {self.fitting:,} requests of {SHORT_REQUEST} tokens"
        if size >= most:
            # Fewer would give the same tokens/s, but requests that could have slow answers would wait for a place.
            knee = self.knee.requests(KNEE_SHARE)
            why = f"{knee:,} that decode reach {KNEE_SHARE:.0%} of the tokens/s of any number (knee)"
        return self._in_mode(_at_most(size, most, why, whose), THROUGHPUT_FACTOR)

    def max_num_batched_tokens(self, max_num_seqs: int) -> Size:
        """Tokens of a step. At least half of them are left for prompts while all requests decode."""
        (_, most), whose = self._vllm()
        source: Source = "default"
        if self.config.performance_mode == "interactivity":
            most, source, whose = (
                most // INTERACTIVITY_DIVISOR,
                "formula",
                f"{whose}, tokens / {INTERACTIVITY_DIVISOR} for interactivity,",
            )
        size, why = most, f"as {whose}"
        if self.knee is not None:
            share = KNEE_SHARE if self.is_server else OFFLINE_KNEE_SHARE
            knee = self.knee.prompt_tokens(share)
            why = f"knee: a step of {knee:,} prompt tokens reaches {100 * share:g}% of the rate of longer ones"
            size = min(knee, LONGEST_CPU_STEP)
            if size < (least := 2 * max_num_seqs):
                size, why = least, f"{why}, and twice max_num_seqs leaves room for prompts beside all answers"
            size, how, why = _at_most(size, most, why, whose)
            source = how if source == "default" else source
        return self._in_mode((size, source, why), THROUGHPUT_FACTOR)

    def max_shared_prefill_tokens(self, budget: int) -> Size:
        """Prompt tokens of a step while several requests are there."""
        if not self.config.enable_chunked_prefill:
            return 0, "default", "prompts are not split"
        if self.config.sources["long_prefill_token_threshold"] != "default":
            return 0, "default", "prompts go in order, each within the long_prefill_token_threshold that was given"
        if not self.is_server:
            return 0, "default", "nobody waits for the first token of an offline batch: prompts go in order"
        if self.knee is None:
            return budget, "default", "prompts share the whole budget: a GPU computes it in a short step"
        size = min(self.knee.prompt_tokens_beside(SHARED_ANSWERS, SHARED_CONTEXT, SHARED_TIMES), budget)
        why = f"{size:,} of prompts make a step about {SHARED_TIMES} times as long as {SHARED_ANSWERS} answers of "
        why += f"{SHARED_CONTEXT:,} tokens alone do; a prompt alone has all {budget:,}, and others may have more: see "
        why += "most_answer_times; vLLM has none"
        return size, "formula", why

    def most_answer_times(self, shared: int, origin: Source, is_async: bool) -> tuple[float, Source, str]:
        """See SchedulerLimits. Only a max_shared_prefill_tokens that was chosen is a least number.

        Args:
            shared: max_shared_prefill_tokens.
            origin: its source.
            is_async: whether a step is scheduled while another one is computed.
        """
        if why_not := self._why_not_paced(shared, origin, is_async):
            return 0.0, "formula", why_not
        why = "without slo_itl, a step takes more than max_shared_prefill_tokens while prompts are slowed down more "
        why += f"than answers, until answers on average have taken {MOST_ANSWER_TIMES:g} times as long as one alone; "
        why += "vLLM has none"
        return MOST_ANSWER_TIMES, "default", why

    def _why_not_paced(self, shared: int, origin: Source, is_async: bool) -> str | None:
        """Why prompts and answers are not slowed down alike; None: they are."""
        config = self.config
        if not shared:
            return "prompts go in order: max_shared_prefill_tokens is 0"
        if origin not in ("formula", "default"):
            return "the max_shared_prefill_tokens that was given holds in every step"
        if self.knee is None:
            return "prompts share the whole budget already"
        if config.slo_itl:
            return "slo_itl says how many tokens of prompts a step takes"
        if config.performance_mode == "interactivity":
            return "answers come first for interactivity"
        if config.num_lanes > 1 or config.pipeline_parallel_size > 1:
            return "the answers of other lanes, or of the batches of other stages, are not in this step"
        if is_async:
            return "the time of the step that is computed meanwhile is not known yet (async_scheduling)"
        if config.scheduling_policy == "priority":
            return "many prompts of a low priority must not slow down answers of a high one"
        return None

    def _vllm(self) -> tuple[tuple[int, int], str]:
        """vLLM's limits, and where."""
        tables, where = CPU_LIMITS, "CPU"
        if self.gpu_bytes is not None:
            is_large = self.gpu_bytes >= LARGE_GPU_BYTES
            tables = LARGE_GPU_LIMITS if is_large else GPU_LIMITS
            where = f"GPUs of {LARGE_GPU_BYTES // GIB} GiB and more" if is_large else "GPUs"
        return tables[0 if self.is_server else 1], f"vLLM on {where}"

    def _in_mode(self, size: Size, factor: int) -> Size:
        """Greater in the throughput mode, if neither limit is given."""
        value, source, why = size
        if self.config.performance_mode != "throughput":
            return size
        if self.config.max_num_seqs is not None or self.config.max_num_batched_tokens is not None:
            return value, source, f"{why}; not doubled for throughput, because one of them is set"
        return value * factor, "formula", f"{why}; x {factor} for throughput"


def _at_most(size: int, most: int, why: str, whose: str) -> Size:
    """A size of our own, or vLLM's, which is no greater."""
    if size < most:
        return size, "formula", f"{why}; {whose} takes {most:,}"
    return most, "default", f"as {whose}; {why}"
