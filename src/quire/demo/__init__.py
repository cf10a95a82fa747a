"""The bundled demo model, a small Llama that answers questions about Python's standard library, and its draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

DEMO_MODEL_NAME = "quire-demo"  # the served name


def path(name: Literal["target", "draft"] = "target") -> Path:
    """The checkpoint folder of the demo model, or of its smaller draft model with the same tokenizer."""
    return Path(__file__).parent / name
