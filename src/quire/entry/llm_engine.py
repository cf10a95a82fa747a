"""LLMEngine: an engine in this process, stepped by its caller. LLM is made of one."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.libraries import load
from quire.engine.rank_spawn import spawned_ranks
from quire.entry.launch import open_model
from quire.entry.lora_requests import OfflineAdapters
from quire.entry.offline import OfflineRunner, engine_metrics
from quire.entry.request_arguments import refuse, wants_special_tokens
from quire.errors import ConfigError
from quire.frontend.input_processor import InputProcessor
from quire.frontend.output_processor import OutputProcessor, draft_metrics
from quire.frontend.prompts import PromptType
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tracing import request_tracer
from quire.lora.request import LoRARequest
from quire.messages import Command
from quire.outputs import RequestOutput
from quire.planning import devices
from quire.planning.binding import freed_behind
from quire.planning.replicas import num_early_ranks
from quire.sampling_params import SamplingParams
from quire.screen.start_display import shown_start

if TYPE_CHECKING:
    from quire.engine.start import StartedEngine
    from quire.metrics.reader import Metric


class LLMEngine:
    """Requests go in at any time, and every step() computes a little of all of them.

    Args:
        keeps_metrics: whether to keep metrics for get_metrics().
    """

    def __init__(self, config: EngineConfig, *, keeps_metrics: bool) -> None:
        if config.num_replicas != 1 or config.has_ray_replicas:
            raise ConfigError(
                "An engine in this process is one replica",
                value=f"{config.data_parallel_size} ({config.data_parallel_backend})",
                expected="1 (mp)",
                fix="Use AsyncLLM or quire serve, which run replicas, or start this script once for each part of the "
                "prompts; a model with experts may share them: --enable-expert-parallel",
                param="data_parallel_size",
            )
        self.config, start_time = config, time.monotonic()
        if config.gpu_ids:
            devices.take_gpus(0, config.num_local_ranks, config.gpu_ids)
        with (
            spawned_ranks(num_early_ranks(config)) as interpreters,
            shown_start(is_quiet=config.disable_log_stats) as progress,
        ):
            parts = open_model(config, progress)
            start = load("quire.engine.start")  # beside the other ranks
            with freed_behind():
                engine: StartedEngine = start.start_engine(
                    config,
                    parts.model_folder,
                    is_server=False,
                    progress=progress,
                    drafter_folder=parts.model_config.drafter_folder,
                    interpreters=interpreters,
                    start_time=start_time,
                )
        self.resolved, self.model_config, self.core = engine.resolved, engine.model_config, engine.core
        self.tokenizer = parts.tokenizer
        self.inputs: InputProcessor = parts.input_processor.with_max_model_len(engine.resolved.model.max_model_len)
        self._metrics = engine_metrics(config, engine) if keeps_metrics else None
        own_metrics = None if self._metrics is None else self._metrics.engines[0]
        if (tracer := request_tracer(config, parts.model_name)) is not None:
            weakref.finalize(self, tracer.close)
        outputs = OutputProcessor(self.tokenizer, own_metrics, new_draft_metrics=draft_metrics(config), tracer=tracer)
        self.runner = OfflineRunner(self.core, outputs)
        self.adapters = OfflineAdapters(self.runner, is_enabled=config.enable_lora)
        self._unfinished: dict[str, None] = {}  # ids of add_request(), in their order; LLM's own are not among them

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLMEngine:
        """vLLM's constructor from a config."""
        return cls(EngineConfig.from_kwargs(**vars(engine_args)), keeps_metrics=not engine_args.disable_log_stats)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> str:
        """Queue a request. The next step() begins to compute it. Returns its id.

        Args:
            params: the sampling parameters; None: the model's defaults. `output_kind` decides about cumulative outputs
                or deltas.
            tokenization_kwargs: only `add_special_tokens` is known.

        Raises:
            InvalidRequestError: the request is refused, or its id is in use.
            AdapterError: its adapter cannot be read.
        """
        refuse(arrival_time=arrival_time, data_parallel_rank=data_parallel_rank or None)
        processed = self.inputs.process(
            request_id,
            prompt,
            params,
            priority=priority,
            add_special_tokens=wants_special_tokens(tokenization_kwargs),
            clamp_max_tokens=True,
            trace_headers=trace_headers,
        )
        self.runner.enqueue(self.adapters.give([processed], [lora_request]))
        self._unfinished[request_id] = None
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the outputs of the requests that have something new.

        The last output of a request that failed has finish_reason "error" and the text in `error`.
        """
        outputs = self.runner.step(self._unfinished)
        for output in outputs:
            if output.finished:
                del self._unfinished[output.request_id]
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether step() will still return outputs."""
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        """The number of requests of add_request() that wait for their last output."""
        return len(self._unfinished)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without a further output. Unknown ids are ignored."""
        request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.runner.abort(request_ids)
        for request_id in request_ids:
            self._unfinished.pop(request_id, None)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, which also applies the chat template. Raises ConfigError if the model runs without one."""
        if self.tokenizer is None:
            raise ConfigError(
                "This engine has no tokenizer", fix="Leave skip_tokenizer_init out", param="skip_tokenizer_init"
            )
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Every series of /metrics as a Counter, Gauge or Histogram of quire.metrics.reader. Raises ConfigError."""
        if self._metrics is None:
            raise ConfigError(
                "This engine keeps no metrics",
                fix="Make it with disable_log_stats=False, as for vLLM",
                param="disable_log_stats",
            )
        from quire.metrics.reader import read

        return read(self._metrics.registry)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        self.core.command(Command("reset_prefix_cache"))
        return True
