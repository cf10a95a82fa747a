"""A Ray cluster of two machines, which are this one, and the processes of a command line."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

OTHER = "127.0.0.2"  # the second machine


@contextmanager
def two_machines(*, other_cpus: int = 1) -> Iterator[None]:
    """This one has one CPU. RAY_ADDRESS names the cluster. Skipped without Ray. There is one cluster at a time."""
    pytest.importorskip("ray", reason="ray is in the extra `ray`")
    with (Path(tempfile.gettempdir()) / "quire-tests-of-ray").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        sizes = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=dict(sizes))
        try:
            del sizes["include_dashboard"]
            cluster.add_node(**sizes | {"num_cpus": other_cpus}, node_ip_address=OTHER)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield
        finally:
            cluster.shutdown()


def processes_with(word: str) -> list[int]:
    """Their numbers, by a word of their command lines."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in words and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found
