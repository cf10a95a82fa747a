"""Pytest plugin: the tests run on the extension in the folder QUIRE_OTHER_EXTENSION.

`make test-sanitize` builds one with AddressSanitizer and UndefinedBehaviorSanitizer, where a finding ends the process.
`make test-arm` builds one for ARM64.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

VARIABLE = "QUIRE_OTHER_EXTENSION"


def load() -> None:
    """Put the other extension in the place of the usual one, before any import of it."""
    (file,) = Path(os.environ[VARIABLE]).glob("_C.*.so")
    spec = importlib.util.spec_from_file_location("quire._C", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import quire

    assert "quire._C" not in sys.modules, "the usual extension is loaded already"
    sys.modules["quire._C"] = quire._C = module


load()
