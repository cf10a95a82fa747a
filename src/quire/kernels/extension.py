"""The compiled extension, without torch: whether it is there, why not, and which instruction sets it runs here."""

from __future__ import annotations

from typing import Any

from quire import envs

C: Any
WHY_NOT: str | None = None  # there is no extension
try:
    from quire import _C as C  # type: ignore[attr-defined, no-redef, unused-ignore]
except ImportError as error:
    C = None
    WHY_NOT = "installed without a C++ compiler" if "cannot import name" in str(error) else str(error)


def is_used() -> bool:
    """Ops run on the compiled kernels: they are built, and QUIRE_FORCE_REFERENCE is not set."""
    return C is not None and not envs.FORCE_REFERENCE.get()


def chosen_isa() -> str:
    """The instruction set an engine started now would run on; "torch" without the kernels."""
    if not is_used():
        return "torch"
    return envs.ISA.get() or str(C.isa())
