"""vLLM's path of AsyncLLMEngine."""

from quire.entry.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
