"""The ladders of instruction sets agree wherever they are written: CMake, isa.h and isa.cpp of csrc, Python."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quire import envs
from quire.cost.arithmetic import tiles
from quire.cost.devices import _FLOPS_PER_CORE
from quire.screen.first_screen import _ISA_NAMES
from quire.screen.layer_kernels import _INTEGER_KERNELS

ROOT = Path(__file__).parents[2]
FAMILIES = {file.stem for file in (ROOT / "csrc/kernels").glob("*.cpp")}
CROSS_COMPILER = "aarch64-linux-gnu-g++"


def cmake_lists(file: str) -> dict[str, list[str]]:
    """The lists that a CMake file sets first: their names without QUIRE_, and their words."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return {name: words.split() for name, words in reversed(re.findall(r"set\(QUIRE_(\w+) ([^)]*)\)", text))}


LISTS = {"x86-64": cmake_lists("CMakeLists.txt"), "ARM64": cmake_lists("cmake/arm64.cmake")}
LADDERS = {name: lists["ISA_LADDER"] for name, lists in LISTS.items()}


def test_ladders_are_those_of_the_sources() -> None:
    header, source = ((ROOT / "csrc" / name).read_text(encoding="utf-8") for name in ("include/quire/isa.h", "isa.cpp"))
    # ARM64 comes first in each
    enums = re.findall(r"enum class Isa : int \{ (.*?) \};\ninline constexpr int kNumIsas = (\d+);", header)
    names = re.findall(r"kNames\[kNumIsas\] = \{(.*?)\}", source, re.DOTALL)
    for ladder, (enum, count), named in zip((LADDERS["ARM64"], LADDERS["x86-64"]), enums, names, strict=True):
        assert [step.split(" = ")[0] for step in enum.split(", ")] == ladder
        assert [int(step.split(" = ")[1]) for step in enum.split(", ")] == list(range(int(count)))
        assert re.findall(r"\w+", named) == ladder
        for level, step in enumerate(ladder):
            assert f"#define QUIRE_LEVEL_{step.upper()} {level}\n" in header
    steps = re.findall(r"\bstep\((\w+), __VA_ARGS__\)", header)
    assert steps == LADDERS["ARM64"][1:] + LADDERS["x86-64"][1:], "QUIRE_STEPS lacks a step, or has another order"


@pytest.mark.parametrize("architecture", LISTS)
def test_families_have_steps_of_the_ladder(architecture: str) -> None:
    lists, ladder = LISTS[architecture], LADDERS[architecture]
    of_family = {name.removeprefix("ISAS_"): steps for name, steps in lists.items() if name.startswith("ISAS_")}
    assert set(of_family) <= FAMILIES
    for family, steps in of_family.items():
        assert steps[0] == "scalar", f"the dispatcher of {family} is compiled with its scalar variant"
        assert steps == [step for step in ladder if step in steps], f"{family}: unknown steps, or another order"
        assert "avx_vnni" not in steps or "avx512" in steps, f"{family}: CPUs with AVX-512 may lack AVX-VNNI"
    assert {f"FLAGS_{step}" for step in ladder} - {"FLAGS_scalar"} <= set(lists)


def test_python_knows_every_step() -> None:
    steps = {step for ladder in LADDERS.values() for step in ladder}
    assert set(_INTEGER_KERNELS) == steps
    assert set(_FLOPS_PER_CORE) == steps - {"scalar"}
    assert steps - {"scalar"} <= set(_ISA_NAMES)
    assert steps <= set(re.findall(r"\w+", envs.ISA.help))


def constant(file: str, pattern: str) -> int:
    """The number that the one match of a pattern in a file of kernels captures."""
    (found,) = re.findall(pattern, (ROOT / "csrc/kernels" / file).read_text(encoding="utf-8"))
    return int(found)


ROWS = r"\bkMaxRows = (\d+)[,;]"
VNNI = r"LEVEL_AVX512_VNNI\n(?:.*\n)*?.*?kMaxRows = (\d+),(?:.*\n)*?#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2\n\nstruct"
DOTS = r"kHasDots = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_DOTPROD(?:.*\n)*?.*kMaxRows = kHasDots \? "


@pytest.mark.parametrize(
    ("steps", "integer_rows"),
    [
        (("avx2", "avx_vnni", "avx512"), ("gemm_grouped_words.h", ROWS)),
        (("avx512_vnni", "avx512_bf16"), ("gemm_grouped.cpp", VNNI)),
        (("neon_dotprod", "neon_i8mm"), ("gemm_grouped_neon.h", DOTS + r"(\d+) : \d+")),
        (("neon",), ("gemm_grouped_neon.h", DOTS + r"\d+ : (\d+)")),
    ],
)
def test_the_cost_model_knows_the_tiles_of_the_kernels(steps: tuple[str, ...], integer_rows: tuple[str, str]) -> None:
    """Read from the sources, since a build has the steps of one architecture."""
    rows = constant("gemm_row_tiles.h", ROWS), constant(*integer_rows)
    for step in steps:
        found = [tiles(step, is_integer=is_integer) for is_integer in (False, True)]
        assert tuple(each.most_streamed for each in found) == rows
        assert not any(each.is_filled for each in found)


def test_the_cost_model_knows_the_tiles_of_a_matrix_unit() -> None:
    for is_integer in (False, True):
        found = tiles("amx", is_integer=is_integer)
        assert (found.num_rows, found.is_filled) == (constant("amx_tiles.h", r"kTileRows = (\d+);"), True)
        assert found.num_streamed == constant("gemm_amx_rows.h", r"kGroupRows = (\d+) \* kTileRows;")
        assert found.num_streamed == constant("gemm_grouped_amx.cpp", r"kMaxRows = (\d+) \* kTileRows,")


def test_every_step_has_tiles() -> None:
    known = {step for ladder in LADDERS.values() for step in ladder if tiles(step, is_integer=True).num_rows < 99}
    assert known == {step for ladder in LADDERS.values() for step in ladder} - {"scalar"}


@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"there is no {CROSS_COMPILER}")
@pytest.mark.parametrize("step", LADDERS["ARM64"])
def test_arm64_compiles(step: str) -> None:
    """One family with code of its own for each step. `make test-arm` compiles and runs all."""
    flags = LISTS["ARM64"].get(f"FLAGS_{step}", [])
    command = [
        CROSS_COMPILER,
        "-std=c++20",
        *(flag for flag in flags if flag != '""'),
        "-fsyntax-only",
        "-Wall",
        "-Werror",
    ]
    command += [f"-DQUIRE_ISA={step}", f"-DQUIRE_ISA_LEVEL={LADDERS['ARM64'].index(step)}"]
    command += [f"-DQUIRE_HAVE_{each}=1" for each in LADDERS["ARM64"]]
    command += ["-Icsrc/include", "-Icsrc", "csrc/kernels/limits.cpp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
