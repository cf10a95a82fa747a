"""The package index answers while other tests run."""

from __future__ import annotations

import os

import pytest

from tests.install.resolvers import Resolvers

RESOLVERS = pytest.StashKey[Resolvers]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the resolvers that the chosen tests wait for. Of several processes only the first one does so: it gets
    these tests.
    """
    resolvers = session.config.stash[RESOLVERS] = Resolvers()
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0" and not session.config.option.collectonly:
        for item in session.items:
            if isinstance(item, pytest.Function) and item.originalname == "test_all_extras_resolve":
                resolvers.start(*(item.callspec.params[name] for name in ("torch", "target")))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """No resolver outlives the tests."""
    if (resolvers := session.config.stash.get(RESOLVERS, None)) is not None:
        resolvers.close()


@pytest.fixture(scope="session")
def resolvers(pytestconfig: pytest.Config) -> Resolvers:
    """Of this process; most of them run already."""
    return pytestconfig.stash[RESOLVERS]
