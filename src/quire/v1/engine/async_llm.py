"""vLLM's path of AsyncLLM."""

from quire.entry.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
