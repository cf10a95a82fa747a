"""Low-rank additions against dense arithmetic in float64, written here; and that a row's bits depend on it alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.formats.weight_format import MXFP4, GroupedFormat
from quire.kernels import cpu, reference
from quire.kernels.dense import linear, pack_linear
from quire.kernels.fp8 import fp8_linear, pack_fp8, quantize_fp8
from quire.kernels.grouped import grouped_linear, pack_grouped
from quire.kernels.lora import (
    DeltaMemory,
    DeltaShape,
    LoraTable,
    RowAdapters,
    add_lora,
    empty_deltas,
    pack_factors,
)
from tests.covering import covering
from tests.kernels.deltas import pack_delta
from tests.kernels.grouped_weights import random_weight

HOST = torch.device("cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
# float32: sums in another order. The others round once: the same value or its neighbour.
TOLERANCES = {F32: (2e-5, 2e-5), F16: (2e-3, 1.1e-3), BF16: (1e-2, 8.2e-3)}


@dataclass
class Layer:
    """A table, and its adapters as they were given."""

    table: LoraTable
    given: list[list[tuple[Tensor, Tensor, float] | None]]  # by slot and part: a, b, scale

    def dense(
        self, base_TN: Tensor, x: Tensor, slots_T: Tensor, of: Callable[[Tensor], Tensor] = Tensor.double
    ) -> Tensor:
        """`of`: what stands for B and for A x."""
        y_TN = base_TN.double()
        for t, slot in enumerate(slots_T.tolist()):
            first = 0
            for part, num_columns in enumerate(self.table.columns):
                if slot >= 0 and (delta := self.given[slot][part]) is not None:
                    a, b, scale = (delta[0].double(), delta[1].double(), delta[2])
                    h_R = a[:, x[t]] if self.table.looks_up else a @ x[t].double()
                    y_TN[t, first : first + num_columns] += scale * (of(b) @ of(h_R))
                first += num_columns
        return y_TN

    def error_bound(self, x: Tensor, slots_T: Tensor) -> Tensor:
        """Of the two terms of bfloat16 that AMX tiles take for A x; elsewhere A x is float32."""
        zeros_TN = torch.zeros(len(slots_T), self.table.N)
        is_in_terms = cpu.isa() == "amx" and self.table.dtype == x.dtype == BF16
        return 2**-17 * self.dense(zeros_TN, x, slots_T, Tensor.abs) if is_in_terms else zeros_TN.double()


def assert_near(got: Tensor, expected: Tensor, tolerance: float, bound: Tensor) -> None:
    """Within a float32's sums in another order, and the bound."""
    excess = (got.double() - expected).abs() - bound - tolerance * (1 + expected.abs())
    assert (excess <= 0).all(), f"{excess.max()} more than allowed"


def layer(
    K: int, columns: Sequence[int], ranks: Sequence[Sequence[int]], dtype: torch.dtype, *, seed: int = 0
) -> Layer:
    """Random adapters; `ranks` by slot and part, 0: none. `columns` negative: an embedding of K tokens."""
    random = torch.Generator().manual_seed(seed)
    looks_up, columns = columns[0] < 0, [abs(N) for N in columns]
    table = LoraTable(len(ranks), 512, K, columns, dtype, HOST, looks_up=looks_up)
    given: list[list[tuple[Tensor, Tensor, float] | None]] = []
    for slot, of_parts in enumerate(ranks):
        deltas: list[tuple[Tensor, Tensor, float] | None] = []
        for part, rank in enumerate(of_parts):
            a = (torch.randn(rank, K, generator=random) / K**0.5).to(dtype)
            b = (torch.randn(columns[part], rank, generator=random) / max(rank, 1) ** 0.5).to(dtype)
            deltas.append((a, b, 0.5 + 0.25 * part + slot) if rank else None)
        given.append(deltas)
        table.set(slot, [None if d is None else pack_delta(*d, looks_up=looks_up) for d in deltas])
    return Layer(table, given)


def inputs(T: int, K: int, N: int, dtype: torch.dtype, looks_up: bool = False) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    base = torch.randn(T, N + 5, generator=random)[:, :N]
    if looks_up:
        return base, torch.randint(K, (T,), generator=random)
    return base, torch.randn(T, K + 3, generator=random).to(dtype)[:, :K]


# K, columns of the parts, ranks by slot and part
LAYERS: list[tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]]] = [
    (64, (64,), ((8,),)),
    (111, (37, 5, 16), ((3, 0, 1), (0, 0, 0), (16, 2, 7))),
    (1, (1,), ((1,), (2,))),
    (1024, (300, 64), ((16, 16), (8, 5))),
    (40, (530,), ((512,), (1,), (33,))),
    (257, (-100,), ((4,), (19,))),
]
NUM_ROWS = [1, 2, 7, 70]


@pytest.mark.parametrize(
    ("isa", "case", "dtype", "x_dtype", "out_dtype"),
    covering(cpu.isas(), LAYERS, DTYPES, DTYPES, DTYPES),
    indirect=["isa"],
)
def test_equals_dense(
    isa: str,
    case: tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]],
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> None:
    K, columns, ranks = case
    made = layer(K, columns, ranks, dtype)
    atol, rtol = TOLERANCES[out_dtype]
    for T in NUM_ROWS:
        base, x = inputs(T, K, made.table.N, x_dtype, made.table.looks_up)
        slots = (torch.arange(T, dtype=torch.int32) + 1).remainder(len(ranks) + 1) - 1
        expected = made.dense(base, x, slots)
        got = add_lora(base, x, slots, made.table, out_dtype)
        assert got.dtype == out_dtype
        if out_dtype == F32:
            assert_near(got, expected, atol, made.error_bound(x, slots))
        else:
            torch.testing.assert_close(got.double(), expected, atol=atol, rtol=rtol)
        twin = reference.add_lora(base, x, slots, made.table, F32)
        torch.testing.assert_close(twin.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_depend_on_themselves_alone(isa: str, dtype: torch.dtype, set_num_threads: Callable[[int], None]) -> None:
    """In a batch, in a prompt, alone; with few threads and many; beside any adapters; in any order."""
    made = layer(515, (321, 70), ((16, 5), (7, 0), (33, 16)), dtype)
    T = 130
    base, x = inputs(T, 515, 391, dtype)
    slots = torch.randint(-1, 3, (T,), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    set_num_threads(1)
    alone = torch.cat([add_lora(base[t : t + 1], x[t : t + 1], slots[t : t + 1], made.table, dtype) for t in range(T)])
    set_num_threads(3)
    assert torch.equal(add_lora(base, x, slots, made.table, dtype), alone)
    for slot in range(-1, 3):
        rows = slots == slot
        of_one = add_lora(base[rows], x[rows], slots[rows], made.table, dtype)
        assert torch.equal(of_one, alone[rows])


RANKS, WIDTHS = [1, 3, 8, 16, 17, 256], [1, 31, 96, 515]
# On AMX, ranks and widths meet in tiles; elsewhere each is a loop of its own.
IN_TILES = [isa for isa in cpu.isas() if isa == "amx"]


@pytest.mark.parametrize(
    ("isa", "rank", "K"),
    [
        *covering([isa for isa in cpu.isas() if isa not in IN_TILES], RANKS, WIDTHS),
        *product(IN_TILES, RANKS, WIDTHS),
    ],
    indirect=["isa"],
)
def test_any_number_of_rows_with_one_adapter(isa: str, rank: int, K: int) -> None:
    """Kernels take few rows and many in different ways, which give the same bits.

    Every rank and every width on every instruction set, and with each other on some; with AMX all of them.
    """
    made = layer(K, (70, 33, 5), ((rank, 16, 0), (2, rank, 9)), BF16)
    T, N = 100, made.table.N
    base, x = inputs(T, K, N, BF16)
    product = product_of(None, N, K, BF16)
    for slot in range(2):
        slots = torch.full((T,), slot, dtype=torch.int32)
        added = [add_lora(base[t : t + 1], x[t : t + 1], slots[t : t + 1], made.table, F32) for t in range(T)]
        alone = torch.cat(added)
        assert_near(alone, made.dense(base, x, slots), 2e-5, made.error_bound(x, slots))
        for rows in (2, 3, 4, 5, 6, 15, 16, 17, 32, 33, 49, 64, 65, T):
            got = add_lora(base[:rows], x[:rows], slots[:rows], made.table, F32)
            assert torch.equal(bits(got), bits(alone[:rows])), rows
            mixed = slots[:rows].clone()
            mixed[rows // 3 : rows // 2] = 1 - slot
            mixed[rows // 2 :: 7] = -1
            got = add_lora(base[:rows], x[:rows], mixed, made.table, F32)
            same = mixed == slot
            assert torch.equal(bits(got[same]), bits(alone[:rows][same])), rows
            assert torch.equal(bits(got[mixed < 0]), bits(base[:rows][mixed < 0])), rows
            wanted = add_lora(product(x[:rows], out_dtype=F32), x[:rows], mixed, made.table, F32)
            got = product(x[:rows], out_dtype=F32, adapters=RowAdapters(made.table, mixed))
            assert torch.equal(bits(got), bits(wanted)), rows


def test_extreme_numbers_have_the_same_bits_in_any_batch(isa: str) -> None:
    """Subnormal sums, overflow, infinity and NaN; a number that is not finite stays in its row."""
    K, columns, rank = 64, (48,), 16
    a = torch.randn(rank, K, generator=torch.Generator().manual_seed(1))
    b = torch.randn(columns[0], rank, generator=torch.Generator().manual_seed(2))
    x = torch.randn(40, K, generator=torch.Generator().manual_seed(3)).to(BF16)
    x[3, 5], x[4, 5], x[5, 5], x[6], x[7] = torch.inf, -torch.inf, torch.nan, 3e38, 0
    base = torch.zeros(40, 48)
    for a_scale, b_scale, scale in (
        (1, 1, 1.0),
        (1e-30, 1e-9, 1.0),
        (1e-20, 1e-20, 1e-3),
        (1e-38, 1, 1.0),
        (1, 1, 1e38),
    ):
        table = LoraTable(1, rank, K, columns, BF16, HOST)
        table.set(0, [pack_delta((a * a_scale).to(BF16), (b * b_scale).to(BF16), scale)])
        slots = torch.zeros(40, dtype=torch.int32)
        got = add_lora(base, x, slots, table, F32)
        for t in range(40):
            alone = add_lora(base[t : t + 1], x[t : t + 1], slots[t : t + 1], table, F32)
            assert torch.equal(bits(got[t : t + 1]), bits(alone)), (a_scale, b_scale, scale, t)
        normal = [t for t in range(40) if t not in (3, 4, 5, 6)]
        if scale <= 1:
            assert got[normal].isfinite().all()
        assert got[5].isnan().all()


def test_rows_without_an_adapter_keep_their_bits(isa: str) -> None:
    made = layer(32, (48,), ((4,),), BF16)
    base, x = inputs(9, 32, 48, BF16)
    base[0, :5] = torch.tensor([0.0, -0.0, torch.inf, 1e-30, 1.00390625])
    slots = torch.tensor([-1, 0] * 4 + [-1], dtype=torch.int32)
    got = add_lora(base, x, slots, made.table, BF16)
    expected = base.to(BF16)
    rows = slots < 0
    assert torch.equal(got[rows].view(torch.int16), expected[rows].view(torch.int16))
    assert not torch.equal(got[~rows], expected[~rows])
    in_place = base.clone()
    assert add_lora(in_place, x, slots, made.table, F32, in_place) is in_place
    assert torch.equal(in_place[rows].view(torch.int32), base[rows].view(torch.int32))
    assert torch.equal(in_place[~rows], add_lora(base, x, slots, made.table, F32)[~rows])


def test_a_slot_is_replaced_and_cleared(isa: str) -> None:
    first, second = layer(32, (48,), ((4,),), BF16), layer(32, (48,), ((7,),), BF16, seed=5)
    base, x = inputs(3, 32, 48, BF16)
    slots = torch.zeros(3, dtype=torch.int32)
    wanted = add_lora(base, x, slots, second.table, BF16)
    assert not torch.equal(add_lora(base, x, slots, first.table, BF16), wanted)
    first.table.set(0, second.table.deltas[0])
    assert torch.equal(add_lora(base, x, slots, first.table, BF16), wanted)
    assert not first.table.is_empty
    first.table.clear(0)
    assert first.table.is_empty
    assert torch.equal(add_lora(base, x, slots, first.table, BF16), base.to(BF16))


def test_writes_into_out(isa: str) -> None:
    made = layer(20, (23,), ((3,),), F32)
    base, x = inputs(8, 20, 23, BF16)
    slots = torch.tensor([0, -1] * 4, dtype=torch.int32)
    wide = torch.zeros(8, 40, dtype=BF16)
    add_lora(base, x, slots, made.table, BF16, wide[:, 8:31])
    assert torch.equal(wide[:, 8:31], add_lora(base, x, slots, made.table, BF16))
    assert not wide[:, :8].any(), "wrote in front of out"
    assert not wide[:, 31:].any(), "wrote behind out"


def test_packing_keeps_the_numbers() -> None:
    a, b = torch.randn(5, 70_000).to(BF16), torch.randn(16_003, 5).to(BF16)
    packed = pack_delta(a, b, 2.0)
    assert torch.equal(packed.a, a)
    assert torch.equal(packed.unpacked_b(), b)
    assert torch.equal(pack_delta(a, b, 2.0, looks_up=True).a, a.t())


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_of_a_file_are_those_of_the_twin(stored: torch.dtype, dtype: torch.dtype) -> None:
    """In every form, of every size, from any byte, in any dtype: also what is rounded, infinite, subnormal or zero."""
    random = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 256, (2_200_000,), dtype=torch.uint8, generator=random)
    factors, end = [], 0
    for at, (rows, columns) in enumerate([(1, 1), (5, 3), (16, 8), (33, 16), (70, 65), (1023, 5), (2048, 8)]):
        for form in range(3):
            begin = 1 + (3 * at + form) * 100_003
            numbers = bits[begin : begin + rows * columns * stored.itemsize].clone().view(stored)
            numbers.nan_to_num_(0.5, torch.inf, -torch.inf)  # the bits of NaN may differ
            bits[begin : begin + numbers.nbytes] = numbers.view(torch.uint8)
            factors.append([begin, cpu.DTYPE_CODES[stored], rows, columns, form, end])
            end += (-(-rows // 16) * 16 if form == 2 else rows) * columns + 1  # a number that nobody writes
    results = []
    for pack in (cpu.pack_factors, reference.pack_factors):
        memory = torch.full((end,), 7.0, dtype=dtype)
        pack(bits, torch.tensor(factors), memory)
        results.append(memory.view(torch.int32 if dtype == F32 else torch.int16))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("change", "to"),
    [(0, -1), (0, 1000), (1, 3), (1, -1), (2, 0), (2, 17), (3, -1), (3, 2**40), (4, 3), (4, -1), (5, -1), (5, 200)],
)
def test_factors_outside_are_refused(change: int, to: int) -> None:
    factor = [0, 0, 16, 4, 2, 0]
    source, memory = torch.zeros(16 * 4 * 4, dtype=torch.uint8), torch.zeros(64)
    pack_factors(source, [factor], memory)
    factor[change] = to
    with pytest.raises(ValueError, match="expected one inside the source and the memory"):
        pack_factors(source, [factor], memory)


# One of each way in which sums of a product are finished.
WEIGHTS = [
    None,  # of the dtype of x
    "fp8",
    GroupedFormat(8, None),
    GroupedFormat(4, 32),
    MXFP4,
    GroupedFormat(4, 32, "int8", "int8", super_size=8),  # Q4_K
    GroupedFormat(8, 64, "float16", "uint8", is_ordered=True),  # GPTQ with act-order
]


def product_of(weight: GroupedFormat | str | None, N: int, K: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A product with a packed weight [N, K] and a bias; it takes rows, `out`, `out_dtype` and `adapters`."""
    random = torch.Generator().manual_seed(N)
    plain_NK = torch.randn(N, K, generator=random) / K**0.5
    bias_N = torch.randn(N, generator=random).half()
    if weight is None:
        return partial(linear, packed=pack_linear(plain_NK.to(dtype)), bias_N=bias_N)
    if isinstance(weight, str):
        return partial(fp8_linear, packed=pack_fp8(quantize_fp8(plain_NK)), bias_N=bias_N)
    return partial(grouped_linear, packed=pack_grouped(random_weight(weight, N, K)), bias_N=bias_N)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == F32 else torch.int16)


@pytest.mark.parametrize(
    ("isa", "weight", "dtype", "x_dtype", "out_dtype"),
    covering(cpu.isas(), WEIGHTS, DTYPES, DTYPES, DTYPES),
    indirect=["isa"],
)
def test_a_product_adds_before_it_rounds(
    isa: str,
    weight: GroupedFormat | str | None,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> None:
    """The bits equal a product in float32 and the addition to it; parts begin and end anywhere in a panel."""
    K, columns, ranks = 300, (37, 5, 150, 16), ((3, 0, 1, 4), (0, 0, 0, 0), (16, 2, 7, 19))
    made = layer(K, columns, ranks, dtype)
    N = made.table.N
    product = product_of(weight, N, K, x_dtype)
    for T in (1, 2, 7, 33, 70):
        _, x = inputs(T, K, N, x_dtype)
        slots = torch.randint(-1, 3, (T,), generator=torch.Generator().manual_seed(T)).to(torch.int32)
        slots[T // 2 :] = 2  # neighbours with one adapter
        adapters = RowAdapters(made.table, slots)
        wanted = add_lora(product(x, out_dtype=F32), x, slots, made.table, out_dtype)
        wide = torch.zeros(T, N + 9, dtype=out_dtype)
        product(x, out=wide[:, 4 : N + 4], adapters=adapters)
        assert torch.equal(bits(wide[:, 4 : N + 4]), bits(wanted))
        assert not wide[:, :4].any(), "wrote in front of out"
        assert not wide[:, N + 4 :].any(), "wrote behind out"
        got = product(x, out_dtype=out_dtype, adapters=adapters)
        assert torch.equal(bits(got), bits(wanted))
        plain = product(x, out_dtype=out_dtype)
        assert torch.equal(bits(got[slots < 0]), bits(plain[slots < 0]))
        assert not torch.equal(got[slots == 2], plain[slots == 2])


@pytest.mark.parametrize("weight", [None, GroupedFormat(8, None)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_whole_panels(isa: str, weight: GroupedFormat | None, dtype: torch.dtype) -> None:
    """Additions that stay in registers have the bits of those that pass through memory.

    They stay there if the result has the dtype of the adapters.
    """
    K, columns, ranks = 300, (64, 144, 128, 32), ((3, 0, 17, 4), (0, 16, 0, 0), (16, 2, 7, 19))
    made = layer(K, columns, ranks, dtype)
    product = product_of(weight, made.table.N, K, dtype)
    narrow = BF16 if dtype == F32 else dtype
    for T in (1, 2, 6, 7, 33, 70):
        _, x = inputs(T, K, made.table.N, dtype)
        slots = torch.randint(-1, 3, (T,), generator=torch.Generator().manual_seed(T)).to(torch.int32)
        slots[T // 2 :] = 2  # neighbours with one adapter
        adapters = RowAdapters(made.table, slots)
        in_float = product(x, out_dtype=F32, adapters=adapters)
        got = product(x, out_dtype=narrow, adapters=adapters)
        assert torch.equal(bits(got), bits(in_float.to(narrow))), T
        plain = product(x, out_dtype=F32)
        assert torch.equal(bits(in_float[slots < 0]), bits(plain[slots < 0]))
        assert_near(in_float, made.dense(plain, x, slots), 2e-5, made.error_bound(x, slots))


def test_a_product_of_many_rows(set_num_threads: Callable[[int], None]) -> None:
    """More than the driver takes at a time: each row has its own adapter's, and the bits that it has alone."""
    made, T = layer(64, (70, 58), ((8, 3), (16, 16), (1, 0)), BF16), 1100
    product = product_of(None, 128, 64, BF16)
    _, x = inputs(T, 64, 128, BF16)
    slots = torch.randint(-1, 3, (T,), generator=torch.Generator().manual_seed(4)).to(torch.int32)
    set_num_threads(3)
    got = product(x, adapters=RowAdapters(made.table, slots))
    for t in (0, 5, 1023, 1024, 1099):
        alone = product(x[t : t + 1], adapters=RowAdapters(made.table, slots[t : t + 1]))
        assert torch.equal(bits(got[t : t + 1]), bits(alone))
    for slot in range(-1, 3):
        rows = slots == slot
        assert torch.equal(bits(product(x[rows], adapters=RowAdapters(made.table, slots[rows]))), bits(got[rows]))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("T", [2, 6, 33])
def test_numbers_that_are_not_finite_stay_in_their_part(isa: str, dtype: torch.dtype, T: int) -> None:
    """Also where a panel of one part lies over columns of the next, and in rows and ranks of the same tile."""
    columns, K = (37, 60, 21), 64
    table, one = LoraTable(1, 5, K, columns, dtype, HOST), torch.ones(5, K, dtype=dtype)
    factors = ((one * torch.inf, 1.0), (one, 0.0), (one * torch.inf, 1.0))
    table.set(
        0, [pack_delta(a, torch.full((N, 5), b, dtype=dtype), 1.0) for N, (a, b) in zip(columns, factors, strict=True)]
    )
    product, x = product_of(None, sum(columns), K, dtype), torch.ones(T, K, dtype=dtype)
    slots = torch.zeros(T, dtype=torch.int32)
    slots[-1] = -1
    got, plain = product(x, adapters=RowAdapters(table, slots)), product(x)
    first, second, third = got[:-1].split(columns, dim=1)
    assert (first == torch.inf).all()
    assert (third == torch.inf).all()
    assert torch.equal(second, plain[:-1, 37:97])
    assert torch.equal(bits(got[-1]), bits(plain[-1]))


def test_memory_of_an_adapter_goes_to_the_next_one() -> None:
    """Of the same size, and only when nothing of the adapter is left."""
    memory, shapes = DeltaMemory(), [DeltaShape(8, 64, 100, 1.0), DeltaShape(8, 32, 16, 1.0)]
    deltas = empty_deltas(shapes, BF16, memory)
    address = deltas[0].memory.data_ptr()
    other = empty_deltas(shapes, BF16, memory)
    assert other[0].memory.data_ptr() != address, "it is in use"
    deltas[0].memory.fill_(torch.nan)
    deltas.pop()
    assert empty_deltas(shapes, BF16, memory)[0].memory.data_ptr() != address, "it is in use still"
    deltas.pop()
    (again, _) = empty_deltas(shapes, BF16, memory)
    assert again.memory.data_ptr() == address
    b_NR = torch.ones(100, 8, dtype=BF16)
    pack_factors(b_NR.view(-1).view(torch.uint8), [again.b_from(0, BF16)], again.memory)
    assert torch.equal(again.unpacked_b(), b_NR)
    assert torch.equal(again.panels[-1, :, 4:], torch.zeros(8, 12, dtype=BF16)), "not what was there before"
    del again, _
    assert memory.tensor(32, BF16).shape == (32,)
    assert memory.tensor(32, torch.float32).shape == (32,)


def test_an_adapter_asks_for_huge_pages() -> None:
    """Steps read some KB of each adapter in turns. With small pages they wait for page tables."""
    if not cpu.available():
        pytest.skip("the compiled kernels ask for them")
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no transparent huge pages")
    (delta,) = empty_deltas([DeltaShape(64, 32_768, 32_768, 1.0)], BF16, DeltaMemory())
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if " " in (name := line.split(":")[0]):  # a mapping: first-end, and so on
            first, end = (int(address, 16) for address in name.split()[0].split("-"))
            is_here = first <= delta.memory.data_ptr() < end
        elif name == "VmFlags" and is_here:
            flags = line
    assert " hg" in flags
