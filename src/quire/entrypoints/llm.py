"""vLLM's path of LLM."""

from quire.entry.llm import LLM

__all__ = ["LLM"]
