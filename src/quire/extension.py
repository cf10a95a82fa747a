"""The compiled extension, without torch: whether it exists, why not, and which instruction sets this CPU has."""

from __future__ import annotations

from pathlib import Path

from quire import envs
from quire.errors import ConfigError

WHY_NOT: str | None = None  # the reason why there is no extension
try:
    from quire import _C
except ImportError as error:
    _C = None  # type: ignore[assignment]
    WHY_NOT = "installed without a C++ compiler" if "cannot import name" in str(error) else str(error)
C = _C  # None: there is no extension
GroupError: type[Exception] = RuntimeError if C is None else C.GroupError  # see distributed.group
RankLate: type[Exception] = RuntimeError if C is None else C.RankLate
StepVoid: type[Exception] = RuntimeError if C is None else C.StepVoid
CLOSED = 0 if C is None else C.SharedGroup.closed
NONSENSE = 0 if C is None else C.SharedGroup.nonsense
STOPPED = 0 if C is None else C.SharedGroup.stopped


def is_used() -> bool:
    """Whether ops run on the compiled kernels: the extension is built, and QUIRE_FORCE_REFERENCE is not set."""
    return C is not None and not envs.FORCE_REFERENCE.get()


def how_to_build() -> str:
    """Advice on how to build the kernels: `make` in a checkout, else pip."""
    compiler = "Install a C++20 compiler (g++ 12 or clang 15), then run"
    checkout = Path(__file__).resolve().parents[2]  # the folder above src
    if (checkout / "CMakeLists.txt").is_file():
        return f"{compiler} `make setup` in {checkout}"
    # --no-cache-dir: pip may have kept a wheel that it built without a compiler.
    return f"{compiler} `pip install --force-reinstall --no-deps --no-cache-dir --no-binary quire quire`"


def require(who: str) -> None:
    """Raise ConfigError if there is no extension: `C` may not be used.

    Args:
        who: the beginning of the error's first sentence.
    """
    if C is None:
        raise ConfigError(
            f"{who} needs the compiled extension, which is not there",
            value=WHY_NOT,
            expected="the compiled extension",
            fix=how_to_build(),
        )


def wished_isa() -> str | None:
    """The value of QUIRE_ISA; None: it is not set. Raises ConfigError for an instruction set that cannot run here."""
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
    """The bytes per second that this number of cores can read from memory now; None: there are no kernels.

    It is the best of 8 measurements, which take 0.2 s and 256 MiB.
    """
    if not is_used():
        return None
    C.set_num_threads(num_threads)
    return C.read_bandwidth(1 << 28, 8)


def chosen_isa() -> str:
    """The instruction set of an engine that would start now; "torch" if it has no kernels. Raises ConfigError."""
    if not is_used():
        return "torch"
    return wished_isa() or C.isa()
