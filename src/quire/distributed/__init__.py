"""Ranks that share one model. It also has a function that vLLM's scripts call between two engines in one process."""

from __future__ import annotations

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that nothing refers to any more. There is no Ray here."""
    gc.collect()
