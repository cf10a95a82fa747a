"""The peaks of mixes of instructions: every loop is assembled and runs."""

from __future__ import annotations

import pytest

from benchmarks import instruction_mixes
from quire.kernels import cpu

PRESENT = [mix for mix in instruction_mixes.MIXES if cpu.available() and mix.needs in cpu.isas()]


@pytest.mark.skipif(not PRESENT, reason="the mixes are of AVX2 and AVX-VNNI")
def test_every_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_mixes, "SECONDS", 1e-6)
    monkeypatch.setattr(instruction_mixes, "TIMES", 1)
    rows = instruction_mixes.measure(PRESENT)
    assert [row["mix"] for row in rows] == [mix.name for mix in PRESENT]
    for mix, row in zip(PRESENT, rows, strict=True):
        groups = [0, *instruction_mixes.GROUPS] if mix.ends else [0]
        tiles = {f"tile_{group}" for group in groups} if mix.quad is not None else set()
        assert row.keys() == {"mix", "registers", "instructions_per_cycle", *tiles}
        assert min(number for number in row.values() if not isinstance(number, str)) > 0
