"""Settings for all tests: variables that have to be set before torch and Triton are imported, and no deadlines."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

from quire.planning import devices
from tests import one_parser, root_logs  # noqa: F401 (what they do)
from tests.examples import IS_FULL, examples

# Torch's threads spin while they wait for each other. With several threads on a busy machine, the many small operations
# of these tests take ten times as long. The engine sets its own number, and the kernels have their own pool.
os.environ["OMP_NUM_THREADS"] = "1"
# Files that engines keep for later starts go to a folder of this run. The first process makes and removes this folder,
# because the processes that run tests end at different times.
if "QUIRE_CACHE_DIR" not in os.environ:
    os.environ["QUIRE_CACHE_DIR"] = tempfile.mkdtemp(prefix="quire-tests-")
    atexit.register(shutil.rmtree, os.environ["QUIRE_CACHE_DIR"], ignore_errors=True)
# Without a GPU, Triton kernels are interpreted.
if not devices.has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"
# If several processes run tests, threads of the kernels would fight for the cores too. Tests that depend on threads set
# their number.
IS_ONE_OF_SEVERAL = "PYTEST_XDIST_WORKER" in os.environ
if IS_ONE_OF_SEVERAL:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_NUM_THREADS", "1")
        importlib.import_module("quire.kernels.cpu")  # reads it once


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leave slow cases out before they are made, because they are a third of all cases.

    If all cases of a function are slow, its first case is made.
    """
    if metafunc.config.option.markexpr != "not slow":
        return
    parametrize, is_slow = metafunc.parametrize, metafunc.definition.get_closest_marker("slow") is not None

    def with_quick_ones(names: str | Sequence[str], values: Iterable[Any], *more: Any, **options: Any) -> None:
        values = list(values)
        if not isinstance(options.get("ids"), Sequence):  # one for each value
            values = [value for value in values if not (is_slow or has_slow(value))] or values[:1]
        parametrize(names, values, *more, **options)

    metafunc.parametrize = with_quick_ones  # type: ignore[method-assign]


def has_slow(value: object) -> bool:
    return isinstance(value, ParameterSet) and any(mark.name == "slow" for mark in value.marks)


# They wait for processes, for limits of time and for the network. Where several processes run tests, the first one
# begins with them, and the others compute meanwhile. In the order of folders, all processes waited at the same time.
WAITING = tuple(
    f"tests/{folder}/test_{name}.py"
    for folder, names in {
        "distributed": "pulse shared_memory whereabouts",
        "e2e": "adapters async_llm chat first_screen listen metrics ray_replicas recovery replicas serve serve_errors "
        "spawn tracing two_machines",
        "engine": "leaving_ranks nodes slow_ranks",
        "frontend": "client grammar_pool supervisor",
        "install": "install requirements",
        "loader": "object_store",
        "measure": "peer_scripts",
        "server": "drain overload",
    }.items()
    for name in names.split()
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IS_ONE_OF_SEVERAL:
        items.sort(key=lambda item: not item.nodeid.startswith(WAITING))


gc.disable()  # until all tests are collected: collecting them makes no garbage


def pytest_collection_finish() -> None:
    """Freeze the objects that exist now, so that garbage collections skip them, and remember their number.

    Every capture of graphs collects garbage and asks for this number.
    """
    gc.set_threshold(10_000, 10, 10)  # a test ends before more garbage than that matters
    gc.enable()
    gc.freeze()
    gc.get_freeze_count = cache(gc.get_freeze_count)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Undo what an engine in this process sets for good.

    Logging takes our tree away from pytest's handler. And an engine sets the number of threads of torch and of the
    kernels, which would fight for the cores in later tests.
    """
    logging.getLogger("quire").propagate = True
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
    if IS_ONE_OF_SEVERAL and (cpu := sys.modules["quire.kernels.cpu"]).get_num_threads() > 1:
        cpu.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file of tests, freeze the objects that its imports have made, because they stay."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# The machine that runs the tests may be busy. `make test` draws the same examples each time, so that it fails only for
# a change; `make test-full` draws new ones.
settings.register_profile(
    "patient",
    max_examples=examples(100),
    deadline=None,
    derandomize=not IS_FULL,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")
