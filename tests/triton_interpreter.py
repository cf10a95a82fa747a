"""Whether Triton kernels can run here, and why not: what tests of them skip with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])


def why_not() -> str | None:
    """The reason why kernels cannot run; None where they can. They are interpreted where there is no GPU."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it has wheels for Linux only"
    if os.environ.get("TRITON_INTERPRET") == "1" and _release("triton") < (3, 7) and _release("numpy") >= (2, 4):
        return "the interpreter of Triton 3.6 fails with numpy 2.4 and later"
    return None
