"""What an engine process does before it is ready."""

from __future__ import annotations

import tempfile
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from quire.config import EngineConfig
from quire.engine import process, start
from quire.errors import VocabularyError
from quire.frontend.client import ProcessClient
from quire.messages import Command, EngineLaunch, EngineReady, UseTokenizer

TOKENIZER = UseTokenizer("a tokenizer.json", [2])


@pytest.mark.parametrize("fails", [False, True])
async def test_tables_for_constraints_are_made_before_it_is_ready(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Making them holds the interpreter: no step waits for it. A tokenizer that has none stops no engine."""
    order: list[Any] = []

    def use_tokenizer(message: UseTokenizer) -> None:
        order.append(message)
        if fails:
            raise VocabularyError("No tables")

    def ready_message() -> EngineReady:
        order.append("ready")
        return EngineReady(100, 10, 16, 4, 64)

    core = Mock(adapters=None, use_tokenizer=use_tokenizer, predicted_seconds=0.0)
    core.has_work.return_value = False
    idle = {"take_memory": lambda: False, "calibrate": lambda: False, "keep_costs": lambda: None}
    started = SimpleNamespace(core=core, ready_message=ready_message, **idle)
    monkeypatch.setattr(start, "start_engine", lambda *arguments, **options: started)
    with tempfile.TemporaryDirectory() as folder:
        addresses = (f"ipc://{folder}/input", f"ipc://{folder}/output")
        client = ProcessClient(*addresses, first=TOKENIZER)
        engine = process.EngineProcess(EngineLaunch(EngineConfig(), "model", *addresses, gets_tokenizer=True))
        thread = threading.Thread(target=engine.run)
        thread.start()
        try:
            while not isinstance(await client.receive(), EngineReady):
                pass
            client.send(Command("shutdown"))
        finally:
            thread.join(30)
            engine.close()
            client.close()
    assert order == [TOKENIZER, "ready"]
    core.shutdown.assert_called_once()
