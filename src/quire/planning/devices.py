"""The facts of this machine: cores, instruction set and allowed memory.

They come from files of Linux, from macOS' sysctl, or from portable calls.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.errors import ConfigError
from quire.logs import get_logger
from quire.resolve import NO_DRIVER, DeviceFacts, GpuFacts

logger = get_logger(__name__)

LEAST_CAPABILITY = 80  # the kernels need a GPU with bfloat16 in tensor cores
_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_FAST_CPUS = Path("/sys/devices/cpu_core/cpus")  # Linux writes it for Intel's CPUs with two kinds of cores
_GPU_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ASK_SECONDS = 60.0  # loading torch from a slow disk takes the longest
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes a huge number for "no limit"


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _cgroup_number(*names: str) -> int | None:
    """The number in the first readable one of these cgroup files (v2 name, then v1 name); None: there is no limit."""
    for name in names:
        text = _read_text(_CGROUP / name)
        if text is not None and text.strip().isdigit():
            value = int(text)
            return value if value < _NO_LIMIT_BYTES else None
    return None


def _meminfo(key: str) -> int | None:
    for line in (_read_text(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def _sysctl(name: str) -> bytes | None:
    """The value of macOS' sysctl(3) with this name; None elsewhere, and for a name that it does not know."""
    if sys.platform != "darwin":
        return None
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.raw[: size.value]


def _sysctl_number(name: str) -> int | None:
    value = _sysctl(name)
    return None if value is None else int.from_bytes(value, sys.byteorder)


def total_memory_bytes() -> int:
    """The bytes of memory that this process may use: the cgroup's limit, or the machine's memory."""
    total = _meminfo("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_number("memory.max", "memory/memory.limit_in_bytes")
    return min(total, limit) if limit else total


def free_memory_bytes() -> int:
    """The bytes of memory that can be taken now without swapping. The page cache counts as free.

    On Linux MemAvailable and the free pages that it leaves out, within the cgroup's limit; on macOS pages that are
    free, hold files, or may be dropped.
    """
    free = _meminfo("MemAvailable")
    if free is not None:
        free += _kept_bytes()
    pages = [_sysctl_number(f"vm.page_{kind}_count") for kind in ("free", "pageable_external", "purgeable")]
    if free is None and pages[0] is not None:
        free = sum(number or 0 for number in pages) * os.sysconf("SC_PAGE_SIZE")
    if free is None:
        return total_memory_bytes() // 2
    limit = _cgroup_number("memory.max", "memory/memory.limit_in_bytes")
    used = _cgroup_number("memory.current", "memory/memory.usage_in_bytes")
    if limit and used is not None:
        cached = 0
        for line in (_read_text(_CGROUP / "memory.stat") or "").splitlines():
            if line.startswith("inactive_file "):
                cached = int(line.split()[1])
        free = min(free, limit - used + cached)
    return max(free, 0)


def _kept_bytes() -> int:
    """Free memory that Linux keeps for single processors: they get it without a lock, and MemAvailable leaves it out.

    It may be some hundred MB for each processor, and it changes whenever a program takes or returns much memory.
    """
    lines = (_read_text(Path("/proc/zoneinfo")) or "").splitlines()
    return os.sysconf("SC_PAGE_SIZE") * sum(int(line.split()[1]) for line in lines if line.strip().startswith("count:"))


def taken_memory_bytes() -> int:
    """The bytes of memory that this process has taken, without pages of files.

    On macOS it is the largest value so far, with pages of files.
    """
    for line in (_read_text(Path("/proc/self/status")) or "").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def num_cores() -> int:
    """The number of physical cores for this process: its affinity without SMT siblings, limited by the cgroup's quota.

    On CPUs with two kinds of cores, only performance cores count, as in csrc/cpu_count.cpp.
    """
    # Level 0 has the performance cores. Macs with Intel's CPUs have no levels.
    if fast := _sysctl_number("hw.perflevel0.physicalcpu") or _sysctl_number("hw.physicalcpu"):
        return fast
    cores, quota = physical_cores(allowed_cpus() - _efficient_cpus()), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def num_efficient_cores() -> int:
    """The number of slower cores beside them; 0: all cores are of one kind."""
    return _sysctl_number("hw.perflevel1.physicalcpu") or physical_cores(_efficient_cpus())


def allowed_cpus() -> set[int]:
    """The CPUs that this thread may use, with SMT siblings."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _efficient_cpus() -> set[int]:
    """The CPUs of this process that are slower than its other CPUs.

    On ARM64, Linux gives each CPU a capacity, and a slower one has less than half of the largest.
    """
    allowed = allowed_cpus()
    if fast := allowed & cpu_list(_read_text(_FAST_CPUS) or ""):
        return allowed - fast
    capacities = {cpu: int(_read_text(_CPUS / f"cpu{cpu}" / "cpu_capacity") or 0) for cpu in allowed}
    largest = max(capacities.values(), default=0)
    return {cpu for cpu, capacity in capacities.items() if 2 * capacity < largest}


def cpu_list(text: str) -> set[int]:
    """The numbers in a list such as `0-3,8`, as Linux writes it. Raises ValueError."""
    cpus: set[int] = set()
    for numbers in text.split(","):
        first, _, last = numbers.strip().partition("-")
        if first:
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def physical_cores(cpus: set[int]) -> int:
    """The number of cores that have these CPUs. SMT siblings count once."""
    cores = set()
    for cpu in cpus:
        siblings = _read_text(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        cores.add(siblings.strip() if siblings else str(cpu))
    return len(cores)


def cpu_quota() -> float | None:
    """The number of cores' time that the cgroup allows; None: there is no limit."""
    quota = (_read_text(_CGROUP / "cpu.max") or "max").split()
    return int(quota[0]) / int(quota[1]) if quota[0].isdigit() else None


def cpu_name() -> str:
    for line in (_read_text(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    if (brand := _sysctl("machdep.cpu.brand_string")) is not None:
        return brand.rstrip(b"\0").decode()
    return platform.processor() or platform.machine()


def has_gpu() -> bool:
    """Whether a driver for GPUs of NVIDIA or AMD is loaded."""
    return any(file.exists() for file in _GPU_FILES)


def num_gpus() -> int:
    """The number of NVIDIA GPUs that this process may see; 0: there are none, or the driver does not tell."""
    if not has_gpu():
        return 0
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """The GPUs that this process may see, as CUDA names them: numbers or UUIDs."""
    if (visible := os.environ.get(_VISIBLE)) is not None:
        return [word for name in visible.split(",") if (word := name.strip())]
    return [str(number) for number in range(len(list(_GPU_FOLDER.iterdir())))] if _GPU_FOLDER.is_dir() else []


def gpu_of_rank(rank: int) -> str:
    """The GPU of one of several ranks that may see the GPUs of this process, as CUDA names it; empty: it has none.

    Not every driver lists its GPUs (that of WSL does not). Then it is a number, and the rank finds out whether there is
    such a GPU.
    """
    gpus = visible_gpus()
    if not gpus and _VISIBLE not in os.environ:
        return str(rank)
    return gpus[rank] if rank < len(gpus) else ""


def own_gpu(rank: int) -> str:
    """The GPU of a rank in a process that another program has started, as CUDA names it; empty: it has none.

    Such a program may let each process see one GPU only, and then this GPU is the rank's. Elsewhere see gpu_of_rank.

    Args:
        rank: its number on this machine.
    """
    gpus = visible_gpus()
    return gpus[0] if len(gpus) == 1 else gpu_of_rank(rank)


def see_gpu(name: str) -> None:
    """Let this process see one GPU only, or none. Call it before torch looks for GPUs.

    Args:
        name: a number or UUID, as CUDA takes it; empty: none.

    Raises ConfigError in a process that uses a GPU already.
    """
    if os.environ.get(_VISIBLE) != name:
        _check_unused(name)
        os.environ[_VISIBLE] = name


def _check_unused(names: str) -> None:
    """Raise ConfigError if this process uses a GPU, because it can no longer choose others."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError(
            "This process uses a GPU already, and would have to see others",
            value=names,
            fix=f"Set {_VISIBLE}={names} for this process, or start the engine before anything uses a GPU",
        )


def take_gpus(first: int, count: int, names: Sequence[str] = ()) -> None:
    """Let this process see some GPUs only. Call it before torch looks for GPUs.

    Args:
        first: the index of the first one among `names`, or without them among the GPUs that the process may see.
            If the driver lists none, it is the number of a GPU that may be there.
        count: their number. If there are fewer, it sees those.
        names: numbers or UUIDs, as CUDA takes them.

    Raises ConfigError for names in a process that uses a GPU already.
    """
    if names:
        _check_unused(",".join(names))
    if names and not num_gpus():
        logger.warning("--device-ids names GPUs, and no driver lists any: leave it out if there are none")
    known = list(names) or visible_gpus()
    if not known and _VISIBLE not in os.environ:  # see gpu_of_rank
        known = [str(number) for number in range(first + count)]
    os.environ[_VISIBLE] = ",".join(known[first : first + count])


def ask_gpu() -> GpuFacts | str:
    """The GPU that an engine would find now, or the reason why there is none. A separate process with torch looks."""
    if not has_gpu():
        return NO_DRIVER
    command = [sys.executable, "-m", "quire.kernels.gpu_facts"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True).stdout
        found = json.loads(answer.splitlines()[-1])  # torch may print lines of its own before
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return f"asking for GPUs failed ({type(error).__name__})"
    return found if isinstance(found, str) else GpuFacts(**found)


def detect(isa: str, gpu: GpuFacts | str = "none was looked for") -> DeviceFacts:
    """Facts of the machine.

    Args:
        isa: the choice of the CPU kernels (quire.kernels.cpu.isa()), or `torch` without them.
        gpu: the GPU that can be used, or why there is none.
    """
    return DeviceFacts(
        kind="cpu",
        name=cpu_name(),
        isa=isa,
        num_cores=num_cores(),
        num_efficient_cores=num_efficient_cores(),
        total_memory_bytes=total_memory_bytes(),
        free_memory_bytes=free_memory_bytes(),
        gpu=gpu if isinstance(gpu, GpuFacts) else None,
        no_gpu=gpu if isinstance(gpu, str) else "",
    )
