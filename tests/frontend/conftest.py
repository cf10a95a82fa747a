"""Both forms of a link between a front end and an engine process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import envs
from quire.distributed import wire
from quire.engine import server_link
from quire.frontend import engine_link
from quire.messages import ServerAddress, UnixSockets
from tests.frontend.links import Ends

KEY = "of the tests, long enough"


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    made: list[server_link.ServerLink] = []
    has_left = threading.Event()
    if request.param == "unix":
        sockets = UnixSockets(f"ipc://{tmp_path}/input", f"ipc://{tmp_path}/output")
        ends = Ends(engine_link.UnixLink(sockets), lambda: server_link.UnixLink(sockets), made, has_left)
    else:
        monkeypatch.setenv(envs.CLUSTER_KEY.name, KEY)
        listener = wire.listen("127.0.0.1", 0)
        server = ServerAddress(*listener.getsockname())
        front = engine_link.TcpLink(listener, KEY.encode())
        ends = Ends(front, lambda: server_link.TcpLink(server, has_left.set), made, has_left, server)
    yield ends
    for link in made:
        link.close()
