"""The bundled demo model, a small Llama that answers questions about Python's standard library, and its draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

DEMO_MODEL_NAME = "quire-demo"  # by which it is served


def path(name: Literal["target", "draft"] = "target") -> Path:
    """The checkpoint folder of the demo model, or of the smaller one with the same tokenizer that drafts for it."""
    return Path(__file__).parent / name
