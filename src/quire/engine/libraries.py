"""Loads the libraries of an engine: torch, which is most of a start."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def load(module: str) -> ModuleType:
    """Import a module that imports torch."""
    is_collected = gc.isenabled()
    gc.disable()  # an import leaves no garbage, and collecting takes up to a fifth of the time
    try:
        return importlib.import_module(module)
    finally:
        if is_collected:
            gc.enable()
