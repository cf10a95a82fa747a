"""What a person sees on standard error while `quire serve` starts: its progress, then the facts and the addresses."""

from __future__ import annotations

import sys
from typing import Any

from quire import __version__
from quire.messages import EngineReady
from quire.model_config import ModelConfig
from quire.resolve import shown_bytes

BAR_WIDTH = 20


class ProgressDisplay:
    """A bar that is redrawn on a terminal; elsewhere one line when a phase begins."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._phase = ""
        self._has_bar = False

    def update(self, phase: str, fraction: float, detail: str) -> None:
        """Show how far a phase is; fraction in 0..1."""
        if self._is_terminal:
            if phase != self._phase and self._has_bar:
                print(file=sys.stderr)
            bar = "#" * round(fraction * BAR_WIDTH)
            # Clear to the end of the line: the text before may have been longer.
            print(
                f"\r  {phase:<9} [{bar:<{BAR_WIDTH}}] {fraction:4.0%} {detail}\x1b[K",
                end="",
                file=sys.stderr,
                flush=True,
            )
            self._has_bar = True
        elif phase != self._phase:
            print(f"  {phase:<9} {detail}".rstrip(), file=sys.stderr, flush=True)
        self._phase = phase

    def close(self) -> None:
        """Take the bar away."""
        if self._has_bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._has_bar = False


def ready_text(ready: EngineReady, model_name: str, model: ModelConfig, url: str, has_chat: bool) -> str:
    """What to know once the server answers."""

    def value(name: str) -> Any:
        setting = ready.resolved[name]
        assert isinstance(setting, dict)
        return setting["value"]

    tokens = ready.num_blocks * ready.block_size
    dtype = value("dtype")
    path, body = "completions", '{"prompt": "Hello"}'
    if has_chat:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "What does os.path.join do?"}]}'
    return f"""
  quire {__version__}  {model_name}  {dtype}, {value("num_threads")} threads
  memory    weights {shown_bytes(model.weight_bytes(dtype))}, KV cache up to {shown_bytes(value("kv_cache_bytes"))}
  KV cache size: {tokens:,} tokens
  Maximum concurrency for {ready.max_model_len:,} tokens per request: {tokens / ready.max_model_len:.2f}x
  chosen    max_num_seqs {ready.max_num_seqs}, max_num_batched_tokens {ready.max_num_batched_tokens}, \
block_size {ready.block_size}, prefix caching {"on" if value("enable_prefix_caching") else "off"}

  ready     {url}   chat in the browser: /   metrics: /metrics   (Ctrl-C stops)
  try       curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'
"""
