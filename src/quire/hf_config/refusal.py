"""How an architecture is refused that our paged attention cannot serve."""

from __future__ import annotations

from quire.errors import ModelConfigError


def refusal(architecture: str, problem: str, fix: str = "") -> ModelConfigError:
    """The error, to be raised. `problem` says what the model is or lacks; `fix`: what may help beside another model."""
    return ModelConfigError(
        f"{architecture} cannot run on paged attention: {problem}",
        expected="an architecture whose layers all use transformers' attention interface, causal, with a KV cache only",
        fix=f"Choose another model, or one of the native architectures{fix}",
    )
