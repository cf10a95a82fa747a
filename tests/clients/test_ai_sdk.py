"""The AI SDK of npm: text, objects and tool calls, whole and streamed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.test_frameworks import QUESTION, answer
from tests.e2e.serving import Serve

FOLDER = Path(__file__).parent / "ai_sdk"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "node_modules").exists(),
    reason="make test-full installs its packages where npm is there",
)
def test_ai_sdk(server: Serve) -> None:
    command = ["node", str(FOLDER / "client.mjs"), f"{server.url}/v1", QUESTION]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)  # the script has checked objects and calls against their schema
    assert found["text"] == found["streamedText"] == answer()
    assert found["object"] == found["streamedObject"]
    assert found["calls"] == found["streamedCalls"]
    assert found["calls"]
