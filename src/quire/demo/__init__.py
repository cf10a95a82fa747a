"""The bundled demo model, a small Llama that answers questions about Python's standard library.

Beside it are its drafters and two LoRA adapters. With `lora` it answers in JSON, with `tools` it calls tools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

DEMO_MODEL_NAME = "quire-demo"  # the served name


def path(name: Literal["target", "draft", "eagle3", "lora", "tools"] = "target") -> Path:
    """The folder of the demo model, of its smaller draft model, of its EAGLE-3 head or of an adapter."""
    return Path(__file__).parent / name
