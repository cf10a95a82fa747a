"""The error for an architecture that our paged attention cannot serve."""

from __future__ import annotations

from quire.errors import ModelConfigError


def refusal(architecture: str, problem: str, fix: str = "") -> ModelConfigError:
    """The error, for the caller to raise. `problem`: the reason; `fix`: help beside the choice of another model."""
    return ModelConfigError(
        f"{architecture} cannot run on paged attention: {problem}",
        expected="causal layers that all use transformers' attention interface, with no state except a KV cache",
        fix=f"Choose another model, or one of the native architectures{fix}",
    )
