"""The demo model, written in every format."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.checkpoint_writer.formats import FORMATS
from quire.demo.data import chats, clean_entries
from tests.checkpoint_writer.folders import quantize


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Chats the demo model knows, in other words for calibration than for the measurement."""
    folder = tmp_path_factory.mktemp("texts")
    paths = {}
    for seed, name in enumerate(("calibration", "measured")):
        paths[name] = str(folder / name)
        Path(paths[name]).write_text("".join(chats(clean_entries()[seed::7], random.Random(seed)))[:16_000])
    return paths


@pytest.fixture(scope="session")
def folders(texts: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in every format."""
    folder = tmp_path_factory.mktemp("folders")
    for to in FORMATS:
        assert quantize(to, folder / to, texts["calibration"]) == 0
    assert quantize("gptq", folder / "gptq-act-order", texts["calibration"], "--act-order") == 0
    return {path.name: path for path in folder.iterdir()}
