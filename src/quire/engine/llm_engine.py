"""vLLM's path of LLMEngine."""

from quire.entry.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
