"""A load that is ready to be sent to a server or to a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.errors import ConfigError
from quire.frontend.tokenizer import Tokenizer
from quire.measure.options import Traffic, Workload
from quire.measure.workload import BenchRequest, chat_render, make_requests

WARM_UP_SEED = 1 << 40  # no round has this seed, so no measured prompt was sent before


@dataclass(frozen=True)
class PreparedLoad:
    """A load that can be sent any number of times. Raises ConfigError for options that contradict each other."""

    workload: Workload
    traffic: Traffic
    tokenizer: Tokenizer
    is_chat: bool
    ignore_eos: bool

    def __post_init__(self) -> None:
        is_trace = self.workload.dataset_name == "timed_trace"
        if is_trace and self.is_chat:
            raise ConfigError("A trace sends token ids", fix="Use --backend openai")
        if self.traffic.self_timed and not is_trace:
            raise ConfigError("Only a trace has times", fix="Leave --self-timed out, or use --dataset-name timed_trace")

    def requests(self, seed: int, count: int | None = None) -> list[BenchRequest]:
        """The requests of one round; `count` replaces --num-prompts."""
        workload = replace(self.workload, seed=seed, num_prompts=count or self.workload.num_prompts)
        if count is not None and workload.dataset_name == "prefix_repetition":
            workload = replace(workload, prefix_repetition_num_prefixes=1)
        return make_requests(workload, self.tokenizer, None if self.is_chat else chat_render(self.tokenizer))

    def warm_up_requests(self) -> list[BenchRequest]:
        """The --num-warmups requests, at least one, that are sent first and not counted."""
        return self.requests(WARM_UP_SEED, self.traffic.num_warmups)
