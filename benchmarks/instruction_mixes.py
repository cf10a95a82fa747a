"""The peak of each mix of instructions that multiplies 256 bits: in registers, and as a tile of a matrix product in L1.

    python benchmarks/instruction_mixes.py [--save HARDWARE]

A mix is given as text of assembly, so no compiler changes it. The script assembles loops with `cc` and runs them in one
thread. "Registers" multiplies the same registers again and again, into ten independent sums. "Tile" is what a kernel
does for 6 rows and 16 columns: it loads and unpacks weights, broadcasts elements of the rows, and has twelve sums.
"Groups of 128" and "groups of 32" are tiles of integers that also end a group as the kernels do: a conversion to float,
a product with the scales of the row and of the columns, and an addition to sums in memory. Nothing is read from beyond
L1. All bytes are 63, so floats are 0.747 and no product is special.

A result is the best of many short runs, because the peak is asked for, in billions of operations (two for a product) of
one core. The clock is not known. So the number in brackets after "registers" is that of instructions for each time in
which four independent additions of integers run, which is a cycle on CPUs with four such pipes. The last table has the
peaks that limits are printed with. In the mix "sign trick, sums of 16 bits" such sums would overflow: it is there for
comparison.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.kernels import cpu
from quire.measure import report

ROWS, VECTORS = 6, 2
TILE_QUADS = 32  # a group of 128
CHUNK = 8  # quads of codes of 4 bits whose sums fit into 16 bits
SUMS = [[f"%ymm{4 + VECTORS * row + vector}" for vector in range(VECTORS)] for row in range(ROWS)]
OPERANDS, ONES, TEMPORARIES = ("%ymm0", "%ymm1"), "%ymm2", ("%ymm3", "%ymm4", "%ymm5")
CHAINS = [f"%ymm{number}" for number in range(6, 16)]
UNROLLED = 4  # steps of a loop in registers
SECONDS, TIMES = 0.0005, 400  # of a run, and runs

# Places in the memory of a tile, which %rsi points to.
MASK, HALVES, TILE_ONES, SCALES, ROW_SCALES, TOTALS, X, WEIGHTS = 0, 32, 64, 128, 192, 1024, 2048, 8192
ROW_BYTES = 4 * 4 * TILE_QUADS  # floats
MEMORY = bytes([63]) * (WEIGHTS + 4 * 32 * VECTORS * TILE_QUADS)  # weights in float


@dataclass(frozen=True)
class Mix:
    """`step`: the text of one step in registers, with the operands {0} and {1}, {ones}, {temporary}, {other} and {sum}.
    `quad`: the lines of a tile for 4 k, given the quad's number; None: registers alone. Without `ends`, sums are not
    those of integers in groups.
    """

    name: str
    needs: str  # the instruction set, as quire.kernels.cpu names it
    step: str
    products: int  # of a step
    quad: Callable[[int], Iterator[str]] | None = None
    has_chunks: bool = False  # sums of CHUNK quads have 16 bits
    ends: bool = True


def of_row(row: int, text: str) -> Iterator[str]:
    """The text for each vector of a row. ymm0 and ymm1 have weights, ymm2 a number of the row."""
    for vector in range(VECTORS):
        yield text.format(
            sum=SUMS[row][vector],
            w=f"%ymm{vector}",
            scales=f"{SCALES + 32 * vector}(%rsi)",
            total=f"{TOTALS + 64 * row + 32 * vector}(%rsi)",
        )


def each_sum(text: str) -> Iterator[str]:
    for row in range(ROWS):
        yield from of_row(row, text)


def multiply(quad: int, element: int, text: str) -> Iterator[str]:
    """For each row: broadcast 4 bytes of its x into ymm2, then the text for each vector, which may use ymm3."""
    for row in range(ROWS):
        yield f"vbroadcastss {X + row * ROW_BYTES + 4 * (4 * quad + element)}(%rsi), %ymm2"
        yield from of_row(row, text)


def load(quad: int, of_quads: int = 1) -> Iterator[str]:
    for vector in range(VECTORS):
        yield f"vmovdqu {WEIGHTS + (quad // of_quads * VECTORS + vector) * 32}(%rsi), %ymm{vector}"


def floats(quad: int) -> Iterator[str]:
    for k in range(4):
        yield from load(4 * quad + k)
        yield from multiply(quad, k, "vfmadd231ps {w}, %ymm2, {sum}")


def widened(quad: int) -> Iterator[str]:
    text = "vpmaddwd {w}, %ymm2, %ymm3; vpaddd %ymm3, {sum}, {sum}"
    yield from load(quad)
    yield from (f"vpand {MASK}(%rsi), %ymm{vector}, %ymm{vector}" for vector in range(VECTORS))
    yield from multiply(quad, 0, text)
    yield from load(quad)
    yield from (f"vpsrlw $8, %ymm{vector}, %ymm{vector}" for vector in range(VECTORS))
    yield from multiply(quad, 1, text)


def halves(quad: int, text: str) -> Iterator[str]:
    yield from load(quad, 2)
    if quad % 2:
        yield from (f"vpsrlw $4, %ymm{vector}, %ymm{vector}" for vector in range(VECTORS))
    yield from (f"vpand {HALVES}(%rsi), %ymm{vector}, %ymm{vector}" for vector in range(VECTORS))
    yield from multiply(quad, 0, text)


def bytes_in_words(quad: int) -> Iterator[str]:
    if quad % CHUNK == 0:
        return halves(quad, "vpmaddubsw %ymm2, {w}, {sum}")
    return halves(quad, "vpmaddubsw %ymm2, {w}, %ymm3; vpaddw %ymm3, {sum}, {sum}")


def dots(quad: int) -> Iterator[str]:
    yield from load(quad)
    yield from multiply(quad, 0, "{{vex}} vpdpbusd %ymm2, {w}, {sum}")


def dots_of_halves(quad: int) -> Iterator[str]:
    return halves(quad, "{{vex}} vpdpbusd %ymm2, {w}, {sum}")


PRODUCTS = "vpmaddwd {0}, {1}, {temporary}; vpaddd {temporary}, {sum}, {sum}"
MIXES = (
    Mix("float: `vfmadd231ps`", "avx2", "vfmadd231ps {0}, {1}, {sum}", 8, floats, ends=False),
    Mix("codes of 8 bits, widened: 2 `vpmaddwd`, 2 `vpaddd`", "avx2", "; ".join([PRODUCTS] * 2), 32, widened),
    Mix(
        "codes of 4 bits: `vpmaddubsw`, `vpaddw`; `vpmaddwd`, `vpaddd` after 8 quads",
        "avx2",
        "; ".join(
            ["vpmaddubsw {0}, {1}, {temporary}; vpaddw {temporary}, {other}, {other}"] * CHUNK
            + ["vpmaddwd {ones}, {other}, {temporary}; vpaddd {temporary}, {sum}, {sum}"]
        ),
        CHUNK * 32,
        bytes_in_words,
        has_chunks=True,
    ),
    Mix(
        "sign trick: `vpsignb`, `vpmaddubsw`, `vpmaddwd`, `vpaddd`",
        "avx2",
        "vpsignb {0}, {1}, {temporary}; vpmaddubsw {temporary}, {0}, {temporary};"
        " vpmaddwd {ones}, {temporary}, {temporary}; vpaddd {temporary}, {sum}, {sum}",
        32,
    ),
    Mix(
        "sign trick, sums of 16 bits: `vpsignb`, `vpmaddubsw`, `vpaddw`",
        "avx2",
        "vpsignb {0}, {1}, {temporary}; vpmaddubsw {temporary}, {0}, {temporary}; vpaddw {temporary}, {sum}, {sum}",
        32,
    ),
    Mix(
        "products of sums: 2 `vpaddw`, `vpmaddwd`, `vpaddd`",
        "avx2",
        "vpaddw {0}, {1}, {temporary}; vpaddw {0}, {ones}, {other};"
        " vpmaddwd {temporary}, {other}, {temporary}; vpaddd {temporary}, {sum}, {sum}",
        32,
    ),
    Mix("codes of 8 bits: `vpdpbusd`", "avx_vnni", "{{vex}} vpdpbusd {0}, {1}, {sum}", 32, dots),
    Mix("codes of 4 bits: `vpdpbusd`", "avx_vnni", "{{vex}} vpdpbusd {0}, {1}, {sum}", 32, dots_of_halves),
)
CYCLE = Mix("", "avx2", "vpaddd {0}, {sum}, {sum}", 0)  # runs four times a cycle
GROUPS = (128, 32)


def function(name: str, body: list[str]) -> list[str]:
    """A function that runs the body as often as its first argument says. Its second argument is memory."""
    loads = [f"vmovdqu (%rsi), %ymm{number}" for number in range(16)]
    return [f".globl {name}", f"{name}:", *loads, ".p2align 6", "1:", *body, "dec %rdi", "jnz 1b", "vzeroupper", "ret"]


def in_registers(mix: Mix) -> list[str]:
    """{other} is a second temporary. With chunks it has the sums of 16 bits, so it belongs to a sum."""
    turns = itertools.cycle(TEMPORARIES[:2])
    chains = (
        zip(CHAINS[:5], CHAINS[5:], strict=True) if mix.has_chunks else ((chain, TEMPORARIES[2]) for chain in CHAINS)
    )
    return [
        mix.step.format(*OPERANDS, sum=chain, temporary=next(turns), other=other, ones=ONES)
        for chain, other in list(chains) * UNROLLED
    ]


def in_l1(mix: Mix, group: int) -> list[str]:
    """All quads of a tile. `group`: the elements of a group, 0: sums stay in registers, or are added to memory at the
    end of a chunk.
    """
    assert mix.quad is not None
    lines: list[str] = []
    for quad in range(TILE_QUADS):
        lines += mix.quad(quad)
        is_chunk = mix.has_chunks and (quad + 1) % CHUNK == 0
        if is_chunk:
            lines += each_sum(f"vpmaddwd {TILE_ONES}(%rsi), {{sum}}, {{sum}}")
        if group > 0 and (quad + 1) * 4 % group == 0:
            for row in range(ROWS):
                lines.append(f"vbroadcastss {ROW_SCALES + 4 * row}(%rsi), %ymm2")
                lines += of_row(
                    row,
                    "vcvtdq2ps {sum}, {sum}; vmulps {scales}, %ymm2, %ymm3; vfmadd213ps {total}, %ymm3, {sum};"
                    " vmovups {sum}, {total}",
                )
            if not mix.has_chunks:
                lines += each_sum("vpxor {sum}, {sum}, {sum}")
        elif is_chunk:
            lines += each_sum("vpaddd {total}, {sum}, {sum}; vmovdqu {sum}, {total}")
    return lines


def assemble(functions: dict[str, list[str]], folder: Path) -> ctypes.CDLL:
    source, library = folder / "mixes.s", folder / "mixes.so"
    lines = [".text", *itertools.chain(*functions.values()), '.section .note.GNU-stack,"",@progbits']
    source.write_text("\n".join(lines) + "\n")
    subprocess.run(["cc", "-shared", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def best_seconds(run: Any) -> float:
    """The least time of one pass of the loop."""
    memory = ctypes.create_string_buffer(MEMORY)
    run.argtypes = [ctypes.c_long, ctypes.c_char_p]

    def seconds(passes: int) -> float:
        start = time.perf_counter()
        run(passes, memory)
        return time.perf_counter() - start

    passes = 64
    while seconds(passes) < SECONDS:
        passes *= 2
    return min(seconds(passes) for _ in range(TIMES)) / passes


def measure(mixes: list[Mix]) -> list[dict[str, Any]]:
    bodies = {"cycle": in_registers(CYCLE)}
    for number, mix in enumerate(mixes):
        bodies[f"registers_{number}"] = in_registers(mix)
        if mix.quad is not None:
            for group in (0, *GROUPS) if mix.ends else (0,):
                bodies[f"tile_{number}_{group}"] = in_l1(mix, group)
    with tempfile.TemporaryDirectory() as folder:
        library = assemble({name: function(name, body) for name, body in bodies.items()}, Path(folder))
        seconds = {name: best_seconds(library[name]) for name in bodies}
    cycle = 4 * seconds["cycle"] / len(bodies["cycle"])
    rows = []
    for number, mix in enumerate(mixes):
        count, taken = len(bodies[f"registers_{number}"]), seconds[f"registers_{number}"]
        row: dict[str, Any] = {
            "mix": mix.name,
            "registers": 2 * mix.products * count / taken / 1e9,
            "instructions_per_cycle": (mix.step.count(";") + 1) * count * cycle / taken,
        }
        for group in (0, *GROUPS):
            if (name := f"tile_{number}_{group}") in seconds:
                row[f"tile_{group}"] = 2 * 32 * TILE_QUADS * ROWS * VECTORS / seconds[name] / 1e9
        rows.append(row)
    return rows


def markdown(result: dict[str, Any]) -> str:
    lines = [
        *report.heading("Peaks of mixes of instructions", result),
        "- Billions of operations (two for a product) of one core with registers of 256 bits, best of many runs. In"
        " brackets: instructions for each time in which four additions of integers run, at most four in a cycle.",
        "",
        *report.table_head("mix | registers | tile in L1 | groups of 128 | groups of 32"),
    ]
    for row in result["rows"]:
        cells = [f"{row['registers']:.0f} ({row['instructions_per_cycle']:.2f})"]
        cells += [f"{row[key]:.0f}" if key in row else "" for key in ("tile_0", *(f"tile_{g}" for g in GROUPS))]
        lines.append(f"| {' | '.join((row['mix'], *cells))} |")
    lines += ["", "Peaks that limits are printed with, one thread:", ""]
    lines += report.table_head("instruction set | float | codes of 8 bits | 6 | 5 | 4")
    for isa, peaks in result["printed"].items():
        lines.append(f"| {isa} | {' | '.join(f'{peak / 1e9:.0f}' for peak in peaks)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = report.script_parser(__doc__).parse_args()
    present = [isa for isa in ("avx2", "avx_vnni") if isa in cpu.isas()]
    if not present:
        print("these mixes need a CPU with AVX2")
        return
    cpu.set_num_threads(1)
    rows = measure([mix for mix in MIXES if mix.needs in present])
    printed = {}
    for isa in present:
        cpu.set_isa(isa)
        printed[isa] = [
            cpu.peak_flops(torch.float32, repeats=20),
            *(cpu.peak_int8_ops(bits, repeats=20) for bits in (8, 6, 5, 4)),
        ]
    result = {
        **report.environment("python", "benchmarks/instruction_mixes.py"),
        "rows": rows,
        "printed": printed,
    }
    report.publish(__file__, args.save, "instruction_mixes", result, markdown(result))


if __name__ == "__main__":
    main()
