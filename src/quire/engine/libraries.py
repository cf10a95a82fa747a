"""Loads the libraries of an engine. The import of torch takes most of the time of a start."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def load(module: str) -> ModuleType:
    """Import a module that imports torch, without garbage collections."""
    is_collected = gc.isenabled()
    gc.disable()  # an import leaves no garbage, and collecting takes up to a fifth of the time
    try:
        return importlib.import_module(module)
    finally:
        if is_collected:
            gc.enable()
