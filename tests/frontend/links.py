"""The two ends of a link, in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.server_link import ServerLink
from quire.frontend.engine_link import EngineLink
from quire.messages import ServerAddress


@dataclass
class Ends:
    """One link in the front end, and the engines' links.

    Attributes:
        made: ends of engines, which the fixture closes.
        has_left: an engine was told that the front end has left.
        server: where the front end listens; None: at Unix sockets.
    """

    front: EngineLink
    new_link: Callable[[], ServerLink]
    made: list[ServerLink]
    has_left: threading.Event
    server: ServerAddress | None = None

    def connect(self) -> ServerLink:
        """An engine comes. It waits for the front end to receive something."""
        self.made.append(self.new_link())
        return self.made[-1]

    async def connected(self) -> tuple[ServerLink, asyncio.Task[bytes]]:
        """An engine, and what the front end receives first."""
        receiving = asyncio.ensure_future(self.front.receive())
        return await asyncio.to_thread(self.connect), receiving
