"""AsyncLLM: vLLM's asynchronous API over an engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from quire import envs
from quire.config import EngineConfig
from quire.errors import UnsupportedFieldError
from quire.frontend.prompts import PromptType
from quire.frontend.tokenizer import Tokenizer
from quire.launch import open_model, start_async_engine
from quire.messages import EngineReady, SetLimits
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams


class AsyncLLM:
    """An engine process and its front end, for one event loop.

    Args:
        model: folder or hub id; None: the bundled demo model.
        **kwargs: fields of EngineConfig (vLLM's names).
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        self.config = EngineConfig.from_kwargs(model=model, **kwargs)
        parts = open_model(self.config, lambda phase, fraction, detail: None)
        self.model_config = parts.model_config
        self._tokenizer = parts.tokenizer
        self._engine, self._process = start_async_engine(self.config, parts)
        self._start_lock = asyncio.Lock()
        self._is_started = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncLLM:
        """vLLM's constructor."""
        given = {name: getattr(engine_args, name) for name in engine_args.__dataclass_fields__}
        return cls(**given)

    async def wait_ready(self) -> EngineReady:
        """Wait until a real token has been produced. Raises the QuireError that kept the engine from starting."""
        async with self._start_lock:
            if not self._is_started:
                self._engine.start()
                self._is_started = True
        return await self._engine.wait_ready(envs.ENGINE_READY_TIMEOUT_S.get())

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: object | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of one prompt; how much each holds is `sampling_params.output_kind`. Leaving the loop aborts."""
        if lora_request is not None:
            raise UnsupportedFieldError(
                "LoRA adapters are not supported in this version", fix="Leave lora_request out", param="lora_request"
            )
        await self.wait_ready()
        async for output in self._engine.generate(
            prompt, sampling_params, request_id, priority=priority, clamp_max_tokens=True
        ):
            yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end without a further output."""
        self._engine.abort(request_id)

    async def get_tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    async def set_limits(self, limits: SetLimits) -> None:
        """Move limits of the running engine."""
        await self.wait_ready()
        self._engine.set_limits(limits)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        await self.wait_ready()
        self._engine.reset_prefix_cache()

    async def check_health(self) -> None:
        """Raises the QuireError that ended the engine, if it has ended."""
        if self._engine.error is not None:
            raise self._engine.error

    async def shutdown(self) -> None:
        """End every stream and the engine process."""
        await self._engine.shutdown()
        await asyncio.to_thread(self._process.stop)
