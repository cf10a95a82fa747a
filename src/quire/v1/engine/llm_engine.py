"""vLLM's path of LLMEngine, beside quire.engine.llm_engine."""

from quire.entry.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
