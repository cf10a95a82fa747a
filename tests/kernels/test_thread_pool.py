"""The kernels' thread pool, seen from Python: every task runs once, on a thread of the pool, also with other sizes,
from several Python threads at once, and in the child of a fork.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.kernels import cpu, dense

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the compiled kernels")


def probe(num_tasks: int) -> list[int]:
    """Thread index that ran each task; -1 = the task did not run."""
    return list(cpu._C.thread_pool_probe(num_tasks))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_every_task_runs_on_a_thread_of_the_pool(num_threads: int, set_num_threads: Callable[[int], None]) -> None:
    set_num_threads(num_threads)
    assert cpu.get_num_threads() == num_threads
    for num_tasks in (0, 1, 2, 3, 100, 1000, 65_535, 65_536, 200_001):  # from 65,536 on they are claimed in pieces
        threads = probe(num_tasks)
        assert len(threads) == num_tasks
        assert all(0 <= thread < num_threads for thread in threads)


def test_a_second_thread_takes_part(set_num_threads: Callable[[int], None]) -> None:
    """Soon on an idle machine; where other programs have the other core, once the system lends it to the thread."""
    set_num_threads(2)
    used: set[int] = set()
    end = time.monotonic() + 60
    while used != {0, 1} and time.monotonic() < end:
        used.update(probe(20_000))
    assert used == {0, 1}


@pytest.mark.parametrize("held_thread", [0, 1, 2])
def test_a_slow_core_holds_up_one_task_only(held_thread: int, set_num_threads: Callable[[int], None]) -> None:
    """The first task of a thread lasts until all others have been taken. If tasks were dealt, its own others would wait
    for it. The thread is asked again until it got a task at all.
    """
    set_num_threads(3)
    tasks_of_held, end = 0, time.monotonic() + 60
    while tasks_of_held == 0 and time.monotonic() < end:
        threads = list(cpu._C.thread_pool_probe(3000, held_thread))
        assert min(threads) >= 0
        tasks_of_held = threads.count(held_thread)
    assert tasks_of_held == 1


def test_jobs_survive_a_change_of_size(set_num_threads: Callable[[int], None]) -> None:
    for num_threads in (4, 1, 3, 2, 4, 2):
        set_num_threads(num_threads)
        assert set(probe(200)) <= set(range(num_threads))


def test_jobs_from_several_python_threads(set_num_threads: Callable[[int], None]) -> None:
    set_num_threads(3)
    torch.manual_seed(0)
    x_TK, weight_NK = torch.randn(20, 64), torch.randn(300, 64)
    packed = dense.pack_linear(weight_NK)
    expected_TN = dense.linear(x_TK, packed)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(100):
            if not torch.equal(dense.linear(x_TK, packed), expected_TN):
                wrong.append("a product differs")
            if min(probe(5000)) < 0:  # long enough for callers to meet
                wrong.append("a task did not run")

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a caller hangs"
    assert wrong == []


FORK = """
import os, sys, time
from quire.extension import C
C.set_num_threads(3)
probe = C.thread_pool_probe
assert min(probe(100)) >= 0
pid = os.fork()
if pid == 0:
    used, deadline = set(), time.monotonic() + 30
    while used != {0, 1, 2} and time.monotonic() < deadline:  # a busy machine may run a thread late
        used.update(probe(5000))
    os._exit(0 if C.num_threads() == 3 and used == {0, 1, 2} else 1)
_, status = os.waitpid(pid, 0)
assert min(probe(100)) >= 0
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(
    "QUIRE_SANITIZED" in os.environ,
    reason="on a busy machine the child hangs where AddressSanitizer's runtime is loaded, and nowhere else",
)
def test_the_child_of_a_fork_starts_its_own_threads() -> None:
    """In a process of its own: a fork of the test process would copy whatever locks other libraries hold."""
    result = subprocess.run([sys.executable, "-c", FORK], check=False, timeout=60, capture_output=True, text=True)
    assert result.returncode == 0, f"the child did not run its tasks on its own threads\n{result.stderr}"


def test_default_is_within_what_the_process_may_use() -> None:
    assert 1 <= cpu.default_num_threads() <= len(os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_default_follows_the_affinity() -> None:
    one_cpu = f"""
import os
os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})
from quire.extension import C
print(C.num_threads())
"""
    result = subprocess.run([sys.executable, "-c", one_cpu], check=False, timeout=60, capture_output=True, text=True)
    assert result.stdout.strip() == "1", result.stderr


def described(root: Path, files: dict[str, str]) -> int:
    """The number of threads where /proc and /sys say this, on the CPUs of this process."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return int(cpu._C.num_threads_described_in(str(root)))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_default_counts_hyper_threads_once(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    apart = {siblings.format(n): str(n) for n in cpus}
    together = {siblings.format(n): f"{cpus[0]},{cpus[1]}" for n in cpus[:2]}
    assert described(tmp_path / "apart", apart) == len(cpus)
    assert described(tmp_path / "together", apart | together) == len(cpus) - 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_default_counts_performance_cores_where_there_are_two_kinds(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    fast = "sys/devices/cpu_core/cpus"
    assert described(tmp_path / "one", {fast: f"{cpus[0]}"}) == 1
    assert described(tmp_path / "all", {fast: f"{cpus[0]}-{cpus[-1]},4000"}) == len(cpus)
    assert described(tmp_path / "none", {fast: "4000-4003"}) == len(cpus), "the process has slower cores only"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(("least", "is_slow"), [(511, True), (512, False), (1024, False)])
def test_default_leaves_out_cores_of_small_capacity(least: int, is_slow: bool, tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    capacity = "sys/devices/system/cpu/cpu{}/cpu_capacity"
    files = {capacity.format(n): "1024" for n in cpus} | {capacity.format(cpus[0]): str(least)}
    assert described(tmp_path, files) == len(cpus) - is_slow


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 1", "sys/fs/cgroup/a/cpu.max": "9 9"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "20000 100000"}, 1),  # less than one CPU
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "9000000 100000"}, None),  # more than there are
        (
            {
                "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/x",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_default_follows_the_quota(files: dict[str, str], limit: int | None, tmp_path: Path) -> None:
    """The least of the groups on the way to the root, whole CPUs of it, and at least one."""
    assert described(tmp_path, files) == (limit or len(os.sched_getaffinity(0)))
