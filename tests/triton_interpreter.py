"""Triton's interpreter: whether kernels can run here, and why not, which tests of them skip with; and a quicker one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import Any


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])


def why_not() -> str | None:
    """The reason why kernels cannot run; None where they can. They are interpreted where there is no GPU."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it has wheels for Linux only"
    if os.environ.get("TRITON_INTERPRET") == "1" and _release("triton") < (3, 7) and _release("numpy") >= (2, 4):
        return "the interpreter of Triton 3.6 fails with numpy 2.4 and later"
    return None


def quicken() -> None:
    """Leave out what the interpreter does again for every call of a device function.

    It replaces what triton.language holds by what it interprets: for a kernel, and again for each function that the
    kernel calls, where the kernel's replacements are in place.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        is_in_place = not any(tl.core.is_builtin(module.load) for module in modules)
        return interpreter._LangPatchScope() if is_in_place else patch(fn)

    interpreter._patch_lang = patch_once


if os.environ.get("TRITON_INTERPRET") == "1" and why_not() is None:
    quicken()
