"""The cost model is the only place that turns bytes and operations into seconds, and it needs no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from quire.cost.step_time import Constants

SOURCE = Path(__file__).parents[2] / "src" / "quire"
COST = SOURCE / "cost"


def test_no_torch() -> None:
    modules = ", ".join(f"quire.cost.{file.stem}" for file in COST.glob("*.py") if file.stem != "__init__")
    code = f"import sys, {modules}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_constants_are_used_in_the_cost_model_alone() -> None:
    """Others may choose constants, but only the cost model multiplies by them."""
    names = "|".join(field.name for field in fields(Constants) if field.name.endswith(("_byte", "_operation", "_flop")))
    assert names.count("|") >= 4
    product = re.compile(rf"\b({names})\b")
    users = {file for file in SOURCE.rglob("*.py") if product.search(file.read_text())}
    assert users
    assert all(file.is_relative_to(COST) for file in users)
