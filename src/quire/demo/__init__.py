"""The bundled demo model, a small Llama that answers questions about Python's standard library, and its drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

DEMO_MODEL_NAME = "quire-demo"  # the served name


def path(name: Literal["target", "draft", "eagle3"] = "target") -> Path:
    """The folder of the demo model, of its smaller draft model with the same tokenizer, or of its EAGLE-3 head."""
    return Path(__file__).parent / name
