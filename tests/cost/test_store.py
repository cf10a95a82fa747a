"""Calibrations between starts: believed only for the same key, whole, possible and of this user alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.cost.calibrate import Fit
from quire.cost.collectives import Link, Links
from quire.cost.overhead import Overhead
from quire.cost.step_time import Constants
from quire.cost.store import CalibrationFile

FIT = Fit(
    Constants(1e-3, 5e-5, 4e-11, 2e-12, 5e-11, 4e-12, 4e-11, 2.0, links=Links(Link(1e-6, 1e-10), Link(3e-5, 1e-9))),
    0.1,
    {1: 1.25, 9: 0.5},
    0.25,
    Overhead(5e-3, 1e-5),
)
KEY = {"machine": "m", "build": "b"}


def path_of(file: CalibrationFile) -> Path:
    assert file.path is not None
    return file.path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "calibrations"


def test_what_is_written_is_read(folder: Path) -> None:
    CalibrationFile(folder, KEY).write(FIT)
    assert CalibrationFile(folder, KEY).read() == FIT
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".json"], "nothing else is left"


def test_without_an_overhead(folder: Path) -> None:
    CalibrationFile(folder, KEY).write(replace(FIT, overhead=None))
    assert CalibrationFile(folder, KEY).read() == replace(FIT, overhead=None)


def test_nothing_is_there(folder: Path) -> None:
    assert CalibrationFile(folder, KEY).read() is None


@pytest.mark.parametrize("other", [{"machine": "n", "build": "b"}, {"machine": "m", "build": "c"}])
def test_another_machine_or_build(folder: Path, other: dict[str, str]) -> None:
    CalibrationFile(folder, KEY).write(FIT)
    another = CalibrationFile(folder, other)
    assert another.read() is None
    path_of(CalibrationFile(folder, KEY)).rename(path_of(another))
    assert another.read() is None, "the name of a file proves nothing"


def test_without_a_place_nothing_is_kept() -> None:
    file = CalibrationFile(None, KEY)
    file.write(FIT)
    assert file.read() is None


def change(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def changed(content: dict[str, Any]) -> Any:
        return content | changes

    return changed


def constant(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {"constants": content["constants"] | {name: value}}


@pytest.mark.parametrize(
    "damage",
    [
        change(spread=math.nan),
        change(spread=0),
        change(spread=1e9),
        change(spread="wide"),
        change(constants=None),
        change(cold=-0.1),
        change(cold=math.nan),
        change(cold=None),
        change(overhead=3.0),
        change(overhead={"per_request": 1e-3}),
        change(overhead={"per_request": 1e-3, "per_prompt_token": -1e-9}),
        change(overhead={"per_request": math.nan, "per_prompt_token": 0.0}),
        change(factors=None),
        change(factors=[1.0]),
        change(factors={"1": 0.0}),
        change(factors={"1": math.nan}),
        change(factors={"-1": 1.0}),
        change(factors={"many": 1.0}),
        constant("per_step", -1.0),
        constant("per_weight_byte", math.inf),
        constant("per_operation", None),
        constant("overlap", 0.5),
        constant("links", None),
        constant("links", [[1e-6, 1e-10]] * 3),
        constant("links", [[1e-6, -1e-10], [0.0, 0.0]]),
        constant("links", [[math.nan, 0.0], [0.0, 0.0]]),
        lambda content: [content],
    ],
)
def test_damage_is_not_believed(folder: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    file = CalibrationFile(folder, KEY)
    file.write(FIT)
    path_of(file).write_text(json.dumps(damage(json.loads(path_of(file).read_text()))))
    assert file.read() is None


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, '"' + "x" * 100_000])
def test_no_json(folder: Path, content: str) -> None:
    file = CalibrationFile(folder, KEY)
    file.write(FIT)
    path_of(file).write_text(content)
    assert file.read() is None


def test_what_others_may_write_is_not_believed(folder: Path) -> None:
    file = CalibrationFile(folder, KEY)
    file.write(FIT)
    path_of(file).chmod(0o666)
    assert file.read() is None
    path_of(file).chmod(0o600)
    folder.chmod(0o777)
    assert file.read() is None
    file.write(FIT)
    folder.chmod(0o700)
    assert file.read() == FIT


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    file = CalibrationFile(folder, KEY)
    file.write(FIT)
    path_of(file).rename(tmp_path / "elsewhere")
    path_of(file).symlink_to(tmp_path / "elsewhere")
    assert file.read() is None
