"""The compiled extension, without torch: whether it is there, why not, and which instruction sets it runs here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire import envs
from quire.errors import ConfigError

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


def how_to_build() -> str:
    """What to do for the compiled kernels; whoever runs a checkout has a Makefile, and others have pip."""
    compiler = "Install a C++20 compiler (g++ 12 or clang 15), then run"
    checkout = Path(__file__).resolve().parents[3]  # of src/quire/kernels
    if (checkout / "CMakeLists.txt").is_file():
        return f"{compiler} `make setup` in {checkout}"
    # pip may have kept what it built without a compiler: --no-cache-dir.
    return f"{compiler} `pip install --force-reinstall --no-deps --no-cache-dir --no-binary quire quire`"


def require(who: str) -> Any:
    """The extension, for what has no other form. `who` begins a sentence. ConfigError where it is not built."""
    if C is None:
        raise ConfigError(
            f"{who} needs the compiled extension, which is not there",
            value=WHY_NOT,
            expected="the compiled extension",
            fix=how_to_build(),
        )
    return C


def wished_isa() -> str | None:
    """What QUIRE_ISA says, if anything. ConfigError for what cannot run here."""
    name = envs.ISA.get()
    if not name:
        return None
    legal = C.isas() if is_used() else []
    if name not in legal:
        raise ConfigError(
            f"Environment variable {envs.ISA.name} names an instruction set that cannot be used here",
            value=name,
            expected="one of " + ", ".join(legal) if legal else "nothing, as the compiled kernels are not used",
            fix="Unset it: the best one is chosen",
            param=envs.ISA.name,
        )
    return name


def read_bandwidth(num_threads: int) -> float | None:
    """Bytes per second that this many cores read from memory now; None without the kernels: the best of 8 readings.

    Takes 0.2 s and 256 MiB.
    """
    if not is_used():
        return None
    C.set_num_threads(num_threads)
    return float(C.read_bandwidth(1 << 28, 8))


def chosen_isa() -> str:
    """The instruction set an engine started now would run on; "torch" without the kernels. Raises ConfigError."""
    if not is_used():
        return "torch"
    return wished_isa() or str(C.isa())
