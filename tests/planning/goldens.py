"""The plans of well-known models: `python -m tests.planning.goldens` writes the file that a test reads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.model_config import load_model_config
from quire.planning.candidates import Candidates, Demand
from quire.planning.hardware import parse_hardware
from quire.planning.request_lengths import RequestLength, RequestLengths
from quire.planning.service import Goals
from quire.resolve import DeviceFacts
from tests.real_models import MODELS, write_config

FILE = Path(__file__).with_name("plans.json")
GIB = 1 << 30
HERE = DeviceFacts(
    kind="cpu", name="test", isa="avx2", num_cores=4, total_memory_bytes=64 * GIB, free_memory_bytes=60 * GIB
)
HARDWARE, PRICES = "l4,l40sx2,h100x8", (0.8, 1.2, 3.0)
CHATS = Demand(RequestLengths("fixed", [RequestLength(1155, 211)]), Goals())


def candidates_of(
    folder: Path,
    hardware: str = HARDWARE,
    degree: int | None = None,
    demand: Demand = CHATS,
    prices: Sequence[float] = (),
    **flags: Any,
) -> Candidates:
    """Of the model in a folder."""
    model, engine = load_model_config(folder), EngineConfig(model="m", **flags)
    every = parse_hardware(hardware, HERE, prices)
    return Candidates(engine, model, every, demand, degree)


def facts(folder: Path) -> dict[str, Any]:
    """What does not depend on speeds, and the best row."""
    found = candidates_of(folder, prices=PRICES)
    alone = [row for row in found.rows if row.degree == 1]
    weights = {row.fit.form.weights.name: sum(row.fit.weight_bytes) for row in alone}
    best = found.best
    assert best is not None
    return {
        "weight_bytes": dict(sorted(weights.items())),
        "kv_bytes_per_token": next(r.fit.kv_bytes_per_token for r in alone if r.fit.form.kv_cache_dtype == "auto"),
        "tokens_on_h100": {
            row.fit.form.weights.name: row.fit.num_tokens
            for row in sorted(alone, key=lambda row: row.fit.form.weights.name)
            if row.fit.form.kv_cache_dtype == "auto" and row.hardware.name == "h100x8"
        },
        "fits_as_it_is_on": sorted(
            {
                f"{row.hardware.name} TP {row.degree}"
                for row in found.rows
                if row.fits and not row.fit.form.expected_loss
            }
        ),
        "best": [best.hardware.name, best.degree, best.copies, *best.flags],
    }


def all_facts() -> dict[str, Any]:
    """Of every model."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: facts(write_config(Path(folder), name)) for name in MODELS}


if __name__ == "__main__":
    FILE.write_text(json.dumps(all_facts(), indent=1) + "\n")
