"""AsyncLLM: vLLM's asynchronous API over one or more engines in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from quire.config import EngineConfig
from quire.entry.launch import open_model, start_async_engine
from quire.entry.request_arguments import wants_special_tokens
from quire.entry.spawn import end, spawn_engines
from quire.frontend.live_limits import move_limits
from quire.frontend.prompts import PromptType
from quire.frontend.supervisor import ready_seconds
from quire.frontend.tokenizer import Tokenizer
from quire.lora.request import LoRARequest
from quire.messages import EngineReady, SetLimits
from quire.outputs import PositionLogprobs, RequestOutput
from quire.sampling_params import SamplingParams


class AsyncLLM:
    """Engine processes, one for each replica, and their front end, for one event loop.

    The processes start to load at once; the first call that needs them waits until they are ready.

    Args:
        model: folder, hub id or GGUF file; None: the bundled demo model.
        **kwargs: fields of EngineConfig (vLLM's names).
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        self.config = EngineConfig.from_kwargs(model=model, **kwargs)
        interpreters = spawn_engines(self.config)
        try:
            parts = open_model(self.config, lambda phase, fraction, detail: None)
            self._engine, self._processes = start_async_engine(self.config, parts, interpreters=interpreters)
        except BaseException:
            end(interpreters)
            raise
        self.model_config = parts.model_config
        self._tokenizer = parts.tokenizer
        self._is_started = False
        self._shutdown: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncLLM:
        """vLLM's constructor from a config."""
        return cls(**vars(engine_args))

    async def wait_ready(self) -> EngineReady:
        """Wait until a real token has been produced. Raises the QuireError that kept the engine from starting."""
        if not self._is_started:
            self._is_started = True
            self._engine.start()
        return await self._engine.wait_ready(ready_seconds())

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of one prompt, cumulative or deltas by `sampling_params.output_kind`. Leaving it aborts.

        Args:
            tokenization_kwargs: only `add_special_tokens` is known.
            data_parallel_rank: the index of the replica that computes the prompt; None: the replica with the least
                work.

        Raises:
            InvalidRequestError: the request is refused.
            AdapterError: the adapter of lora_request cannot be read.
            EngineDeadError: the engine has ended.
            EngineRestartedError: several engines have ended while they computed the prompt; the next one starts.
        """
        add_special_tokens = wants_special_tokens(tokenization_kwargs)
        await self.wait_ready()
        adapter = None if lora_request is None else (await self._engine.adapters.ensure(lora_request)).name
        prompt_logprobs: list[PositionLogprobs | None] | None = None
        async for output in self._engine.generate(
            prompt,
            sampling_params,
            request_id,
            adapter=adapter,
            data_parallel_rank=data_parallel_rank,
            priority=priority,
            add_special_tokens=add_special_tokens,
            clamp_max_tokens=True,
            trace_headers=trace_headers,
        ):
            if output.prompt_logprobs is not None:
                if prompt_logprobs is None:  # the same with every output
                    prompt_logprobs = await asyncio.to_thread(list, output.prompt_logprobs)
                output.prompt_logprobs = prompt_logprobs
            yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end without a further output."""
        self._engine.abort(request_id)

    async def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None: the model runs without one."""
        return self._tokenizer

    async def set_limits(self, limits: SetLimits) -> None:
        """Change limits of the running engine, from its next step on. A limit that is None does not change.

        Raises InvalidRequestError for a value out of its bounds, because memory was planned for the first limits.
        """
        await self.wait_ready()
        given = {name: getattr(limits, name) for name in limits.__struct_fields__}
        move_limits(self._engine, {name: value for name, value in given.items() if value is not None})

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        await self.wait_ready()
        self._engine.reset_prefix_cache()
        return True

    async def check_health(self) -> None:
        """Raise the QuireError that ended the engine, or NotReadyError if the engine is starting again."""
        if self._engine.error is not None:
            raise self._engine.error
        if self._engine.is_restarting:
            self._engine.check_running()

    def shutdown(self) -> asyncio.Task[None]:
        """End every stream and the engine processes. Without this call the engines end together with this process.

        Like vLLM's, it is a plain function. The caller may await its result: after that, the readers of all streams
        know of the end, and the processes are gone. A thread waits for them, for some seconds if Ray has placed them.
        """
        if self._shutdown is None:
            self._engine.close()
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                self._processes.stop()
                raise
            stopping = loop.run_in_executor(None, self._processes.stop)
            self._shutdown = loop.create_task(self._end(stopping), name="shutdown")
        return self._shutdown

    async def _end(self, stopping: asyncio.Future[None]) -> None:
        await self._engine.shutdown()
        await stopping
