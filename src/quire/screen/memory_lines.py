"""The memory of a plan in words for people. The first screen, `quire explain` and JSON logs all use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quire.planning.memory_plan import CHAT_TOKENS
from quire.resolve import shown_bytes


@dataclass(frozen=True)
class MemorySummary:
    """The bytes, blocks and capacity of a plan. The resolved settings have the same names."""

    weight_bytes: int
    kv_cache_bytes: int
    work_bytes: int
    unplanned_bytes: int  # negative: the plan counts on memory that is not free now
    num_blocks: int
    block_size: int
    max_model_len: int
    kv_cache_tokens: int
    kv_cache_chats: int  # chats of `chat_tokens` tokens

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MemorySummary:
        """The summary from the values of settings, by name. Settings without a field are ignored."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    @property
    def chat_tokens(self) -> int:
        return min(CHAT_TOKENS, self.max_model_len)

    def plan(self) -> str:
        """The memory of each part."""
        sign = "-" if self.unplanned_bytes < 0 else ""
        parts = (
            f"weights {shown_bytes(self.weight_bytes)}",
            f"KV {shown_bytes(self.kv_cache_bytes)}",
            f"work {shown_bytes(self.work_bytes)}",
            f"free {sign}{shown_bytes(abs(self.unplanned_bytes))}",
        )
        return " | ".join(parts)

    def capacity(self) -> tuple[str, str]:
        """The capacity of the KV cache. The words up to the number of tokens, and the second line, are vLLM's."""
        chats = "1 chat" if self.kv_cache_chats == 1 else f"{self.kv_cache_chats:,} chats"
        length = self.chat_tokens
        size = f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"
        concurrency = f"{self.kv_cache_tokens / self.max_model_len:.2f}x"
        return (
            f"KV cache size: {self.kv_cache_tokens:,} tokens = {chats} of {size}",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {concurrency}",
        )

    def as_dict(self) -> dict[str, int]:
        """The object for JSON."""
        derived = {
            "num_tokens": self.kv_cache_tokens,
            "chat_tokens": self.chat_tokens,
            "num_chats": self.kv_cache_chats,
        }
        return asdict(self) | derived
