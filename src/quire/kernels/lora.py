"""Low-rank additions (LoRA) to the results of products: compiled kernels on CPU, Triton on GPU, plain torch otherwise.

A row's bits depend on the row and its adapter alone. Rows without an adapter get the bits of a product without it. On a
CPU a product adds in its own kernel, before it rounds, and gives the bits of `add_lora` after a product in float32.
Dimensions: T tokens, K in-features, N out-features, R rank, S slots, P parts of the out-features.
"""

from __future__ import annotations

import mmap
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.formats.weight_format import LORA_PANEL
from quire.kernels import cpu, gpu, reference
from quire.kernels.guards import check_contiguous, check_dtype, check_last_stride, check_places, check_shape

MOST_PARTS = 4  # kLoraParts
_ALIGNMENT = 64  # bytes of a factor
_ROWS, _TRANSPOSED, _PANELS = range(3)  # FactorForm
_ROWS_BEFORE_ROUNDING = 240  # elements that are multiplied in float32 at a time: this bounds their memory


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """scale * B A without its numbers. `looks_up`: of embeddings, K tokens."""

    rank: int
    K: int
    N: int
    scale: float
    looks_up: bool = False


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """scale * B A in the form that `add_lora` reads, which CPUs and GPUs share.

    Attributes:
        memory: the memory of all deltas of an adapter.
        first_a, first_b: the elements where A and B begin.
    """

    shape: DeltaShape
    memory: Tensor
    first_a: int
    first_b: int

    @property
    def rank(self) -> int:
        return self.shape.rank

    @property
    def a(self) -> Tensor:
        """[R, K]; for embeddings [K, R], so that a token's numbers lie side by side."""
        R, K = self.shape.rank, self.shape.K
        sizes = (K, R) if self.shape.looks_up else (R, K)
        return self.memory[self.first_a : self.first_a + R * K].view(sizes)

    @property
    def panels(self) -> Tensor:
        """B as [N / 16, R, 16], padded with zeros."""
        num_panels, R = -(-self.shape.N // LORA_PANEL), self.shape.rank
        return self.memory[self.first_b :][: num_panels * R * LORA_PANEL].view(num_panels, R, LORA_PANEL)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.panels.nbytes

    def unpacked_b(self) -> Tensor:
        """B [N, R]."""
        return self.panels.transpose(1, 2).reshape(-1, self.rank)[: self.shape.N]

    def a_from(self, begin: int, dtype: torch.dtype) -> list[int]:
        """struct Factor: where `pack_factors` finds A [R, K], in bytes of its source, and where it puts it."""
        form = _TRANSPOSED if self.shape.looks_up else _ROWS
        return [begin, cpu.DTYPE_CODES[dtype], self.rank, self.shape.K, form, self.first_a]

    def b_from(self, begin: int, dtype: torch.dtype) -> list[int]:
        """The same for B [N, R]."""
        return [begin, cpu.DTYPE_CODES[dtype], self.shape.N, self.rank, _PANELS, self.first_b]

    def words(self) -> list[int]:
        """struct LoraDelta: address of A, address of B, rank, bits of the scale as float64."""
        begin, size = self.memory.data_ptr(), self.memory.itemsize
        (scale,) = struct.unpack("q", struct.pack("d", self.shape.scale))
        return [begin + self.first_a * size, begin + self.first_b * size, self.rank, scale]


class DeltaMemory:
    """Gives each adapter one piece of memory, and keeps the last piece whose deltas are gone for the next adapter.

    To map the memory of an adapter anew takes much longer than to fill it where a virtual machine gets its pages from a
    host (benchmarks/NOTES.md). Any thread may use it.
    """

    def __init__(self) -> None:
        self._spare: deque[mmap.mmap] = deque(maxlen=1)

    def tensor(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Memory with any content. It comes back when the tensor object is gone, so hold that one and no view of it.

        Raises MemoryError.
        """
        num_bytes = num_elements * dtype.itemsize
        spare = self._take(num_bytes)
        try:
            piece = spare or mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:  # an OSError of a file would mean something else
            raise MemoryError(f"no memory for {num_elements} elements of an adapter") from error
        memory = torch.frombuffer(piece, dtype=dtype)
        if spare is None:
            cpu.advise_huge_pages(memory)
        weakref.finalize(memory, self._spare.append, piece).atexit = False
        return memory

    def _take(self, num_bytes: int) -> mmap.mmap | None:
        """The spare piece if it has this size; otherwise it is given back to the system."""
        with suppress(IndexError):
            piece = self._spare.pop()
            return piece if len(piece) == num_bytes else None
        return None


def empty_deltas(shapes: Sequence[DeltaShape], dtype: torch.dtype, memory: DeltaMemory) -> list[PackedDelta]:
    """Deltas side by side in one piece of memory, which is free again when all of them are gone. They hold any
    numbers until `pack_factors` writes them.

    malloc would not give all of the memory back, because an adapter has hundreds of small factors. The piece has huge
    pages where the system has them: a step reads a few KB of each adapter in turns, and most of the time would go to
    looking up pages.

    Raises MemoryError.
    """
    check_dtype("a delta", torch.empty(0, dtype=dtype), *cpu.DTYPE_CODES)
    step, end, places = _ALIGNMENT // dtype.itemsize, 0, []
    for shape in shapes:
        for size in (shape.rank * shape.K, shape.rank * -(-shape.N // LORA_PANEL) * LORA_PANEL):
            places.append(end)
            end += -(-size // step) * step
    if not shapes:
        return []
    piece = memory.tensor(end, dtype)
    return [PackedDelta(shape, piece, *places[2 * i : 2 * i + 2]) for i, shape in enumerate(shapes)]


def pack_factors(source: Tensor, factors: Sequence[Sequence[int]], memory: Tensor) -> None:
    """Copy factors from the bytes of a file into the memory of deltas.

    Args:
        source: uint8. A tensor in it may begin at any byte.
        factors: results of PackedDelta.a_from and b_from.
        memory: the memory of the deltas, on a CPU.
    """
    check_places(source=source, memory=memory)
    check_dtype("source", source, torch.uint8)
    check_dtype("memory", memory, *cpu.DTYPE_CODES)
    check_contiguous(source=source, memory=memory)
    pack = cpu.pack_factors if cpu.available() else reference.pack_factors
    pack(source, torch.tensor(factors, dtype=torch.int64), memory)


@dataclass(frozen=True, slots=True)
class SlotRow:
    """The additions of an adapter to each part of a layer: its row of a table, and the deltas that it points to."""

    deltas: list[PackedDelta | None]
    words_P4: Tensor


class LoraTable:
    """The additions of all adapters to one layer: a row of pointers for each slot. Rows change between steps.

    Args:
        max_rank: the largest rank of any delta.
        columns: N of each part, in order.
        dtype: the dtype of A and B.
        looks_up: the layer is an embedding of K tokens.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        K: int,
        columns: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        looks_up: bool = False,
    ) -> None:
        if not 1 <= len(columns) <= MOST_PARTS:
            raise ValueError(f"the layer has {len(columns)} parts, expected 1 to {MOST_PARTS}")
        check_dtype("a table", torch.empty(0, dtype=dtype), *cpu.DTYPE_CODES)
        self.K, self.columns, self.dtype, self.looks_up = K, tuple(columns), dtype, looks_up
        self.N, self.max_rank = sum(columns), max_rank
        self._filled: set[int] = set()
        self._nothing = SlotRow([None] * len(columns), torch.zeros((len(columns), 4), dtype=torch.int64))
        self.deltas: list[list[PackedDelta | None]] = [[None] * len(columns) for _ in range(num_slots)]
        self.words_SP4 = torch.zeros((num_slots, len(columns), 4), dtype=torch.int64, device=device)

    @cached_property
    def compiled(self) -> cpu._C.LoraTable:
        """The table in the form of the CPU kernels."""
        return cpu.lora_table(self.words_SP4, self.dtype, self.K, self.columns)

    @property
    def is_empty(self) -> bool:
        """Whether no slot adds anything."""
        return not self._filled

    def row(self, deltas: Sequence[PackedDelta | None]) -> SlotRow:
        """The row of an adapter. Any thread may make it."""
        words: list[list[int]] = []
        for part, (delta, N) in enumerate(zip(deltas, self.columns, strict=True)):
            if delta is None:
                words.append([0] * 4)
                continue
            check_places(table=self.words_SP4, deltas=delta.memory)
            check_dtype("a delta", delta.memory, self.dtype)
            shape = delta.shape
            if (shape.K, shape.looks_up) != (self.K, self.looks_up):
                raise ValueError(
                    f"a delta has {shape.K} in-features, expected {self.K}; of an embedding: {shape.looks_up}, "
                    f"expected {self.looks_up}"
                )
            if shape.rank > self.max_rank:
                raise ValueError(f"a delta has rank {shape.rank}, expected {self.max_rank} at most")
            if shape.N != N:
                raise ValueError(f"a delta has {shape.N} out-features, expected {N} of part {part}")
            words.append(delta.words())
        return SlotRow(list(deltas), torch.tensor(words))

    def put(self, slot: int, row: SlotRow) -> None:
        """Give a slot a row that this table, or one of the same layer, has made. It keeps the deltas alive."""
        self.words_SP4[slot] = gpu.place(row.words_P4, self.words_SP4.device)
        self.deltas[slot] = row.deltas
        (self._filled.discard if all(delta is None for delta in row.deltas) else self._filled.add)(slot)

    def set(self, slot: int, deltas: Sequence[PackedDelta | None]) -> None:
        """The deltas of the adapter in a slot, for each part."""
        self.put(slot, self.row(deltas))

    def clear(self, slot: int) -> None:
        """The slot adds nothing."""
        self.put(slot, self._nothing)


@dataclass(frozen=True)
class RowAdapters:
    """The adapters of the rows of a product, and their additions.

    Attributes:
        slots_T: int32 in [-1, S); -1: the row has none.
    """

    table: LoraTable
    slots_T: Tensor

    def check(self, T: int, K: int, N: int) -> None:
        """Check that the slots fit a product of T rows."""
        if (self.table.K, self.table.N) != (K, N):
            raise ValueError(f"the adapters' table is of [{self.table.N}, {self.table.K}], expected [{N}, {K}]")
        if self.table.looks_up:
            raise ValueError("the adapters' table is of an embedding, expected one of a product")
        _check_slots(self.slots_T, T, self.table)

    def add_to(
        self, product: Callable[..., Tensor], x_TK: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
    ) -> Tensor:
        """A product with the additions, where its own kernel does not add them.

        Args:
            product: gives the product of x in float32; takes `out`.
        """
        dtype = out_dtype or (x_TK.dtype if out is None else out.dtype)
        if dtype == torch.float32:
            base_TN = product(x_TK, out=out, out_dtype=dtype)
            return add_lora(base_TN, x_TK, self.slots_T, self.table, dtype, base_TN)
        if out is None:
            out = torch.empty((x_TK.shape[0], self.table.N), dtype=dtype, device=x_TK.device)
        pieces = zip(*(torch.split(x, _ROWS_BEFORE_ROUNDING) for x in (x_TK, self.slots_T, out)), strict=True)
        for some_TK, slots_T, some_out in pieces:
            add_lora(product(some_TK, out_dtype=torch.float32), some_TK, slots_T, self.table, dtype, some_out)
        return out


def add_lora(
    base_TN: Tensor, x: Tensor, slots_T: Tensor, table: LoraTable, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """y_TN = base + scale * B (A x) of each row's adapter, float32 inside, rounded once.

    Args:
        base_TN: float32; rows may be strided.
        x: [T, K] of any of the three dtypes, rows may be strided; for embeddings, token ids (int64) [T], in [0, K).
        slots_T: int32 in [-1, S); -1: no adapter, and base is only rounded.
        out: [T, N] of `out_dtype`, takes the result; rows may be strided. If it is float32, it may be base.
    """
    _check(base_TN, x, slots_T, table, out_dtype, out)
    if cpu.available() and base_TN.is_cpu and not gpu.takes(base_TN):
        out = torch.empty(base_TN.shape, dtype=out_dtype, device=base_TN.device) if out is None else out
        cpu.add_lora(
            table.compiled, None if table.looks_up else x, x if table.looks_up else None, slots_T, base_TN, out
        )
        return out
    if gpu.takes(base_TN):
        out = torch.empty(base_TN.shape, dtype=out_dtype, device=base_TN.device) if out is None else out
        gpu.kernels().add_lora(base_TN, x, slots_T, table, out)
        return out
    y_TN = reference.add_lora(base_TN, x, slots_T, table, out_dtype)
    return y_TN if out is None else out.copy_(y_TN)


def _check_slots(slots_T: Tensor, T: int, table: LoraTable) -> None:
    check_places(slots=slots_T, table=table.words_SP4)
    check_shape("slots", slots_T, T)
    check_dtype("slots", slots_T, torch.int32)
    check_contiguous(slots=slots_T)


def _check(
    base_TN: Tensor, x: Tensor, slots_T: Tensor, table: LoraTable, out_dtype: torch.dtype, out: Tensor | None
) -> None:
    check_places(base=base_TN, x=x, slots=slots_T, out=out)
    if base_TN.dim() != 2:
        raise ValueError(f"base is {list(base_TN.shape)}, expected [T, {table.N}]")
    T = base_TN.shape[0]
    check_shape("base", base_TN, T, table.N)
    check_dtype("base", base_TN, torch.float32)
    _check_slots(slots_T, T, table)
    check_last_stride(base=base_TN, out=out)
    if table.looks_up:
        check_shape("token_ids", x, T)
        check_dtype("token_ids", x, torch.int64)
        check_contiguous(token_ids=x)
    else:
        check_shape("x", x, T, table.K)
        check_dtype("x", x, *cpu.DTYPE_CODES)
        check_last_stride(x=x)
    if out_dtype not in cpu.DTYPE_CODES:
        raise TypeError(f"the result's dtype is {out_dtype}, expected {' or '.join(map(str, cpu.DTYPE_CODES))}")
    if out is not None:
        check_shape("out", out, T, table.N)
        check_dtype("out", out, out_dtype)
