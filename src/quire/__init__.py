"""Quire: an LLM inference and serving engine. Public names load lazily, so that `import quire` costs milliseconds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "quire.entry.llm",
    "AsyncLLM": "quire.entry.async_llm",
    "LLMEngine": "quire.entry.llm_engine",
    "EngineArgs": "quire.cli.engine_args",
    "EngineConfig": "quire.config",
    "SamplingParams": "quire.sampling_params",
    "BeamSearchParams": "quire.sampling_params",
    "RequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "Logprob": "quire.outputs",
    "BeamSearchOutput": "quire.outputs",
    "BeamSearchSequence": "quire.outputs",
    "TextPrompt": "quire.frontend.prompts",
    "TokensPrompt": "quire.frontend.prompts",
    "PromptType": "quire.frontend.prompts",
}
# vLLM's names, so that a script runs when only its import is changed. New code uses the names on the right.
_ALIASES = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}

__all__ = ["__version__", *_PUBLIC, *_ALIASES]

if TYPE_CHECKING:
    from quire.cli.engine_args import EngineArgs as EngineArgs
    from quire.config import EngineConfig as EngineConfig
    from quire.entry.async_llm import AsyncLLM as AsyncLLM
    from quire.entry.llm import LLM as LLM
    from quire.entry.llm_engine import LLMEngine as LLMEngine
    from quire.frontend.prompts import PromptType as PromptType
    from quire.frontend.prompts import TextPrompt as TextPrompt
    from quire.frontend.prompts import TokensPrompt as TokensPrompt
    from quire.outputs import BeamSearchOutput as BeamSearchOutput
    from quire.outputs import BeamSearchSequence as BeamSearchSequence
    from quire.outputs import CompletionOutput as CompletionOutput
    from quire.outputs import Logprob as Logprob
    from quire.outputs import RequestOutput as RequestOutput
    from quire.sampling_params import BeamSearchParams as BeamSearchParams
    from quire.sampling_params import SamplingParams as SamplingParams

    AsyncEngineArgs = EngineArgs
    AsyncLLMEngine = AsyncLLM


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name not in _PUBLIC:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
