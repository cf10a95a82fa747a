"""The GPU kernels of adapters' additions against the twin, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import gpu, reference
from quire.kernels.lora import LoraTable, add_lora
from tests.examples import IS_FULL
from tests.kernels.deltas import pack_delta

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# float32: sums in another order. The others round once; the interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.float16: (2e-3, 1.1e-3), torch.bfloat16: (1e-2, 1.6e-2)}


@pytest.fixture(autouse=True)
def _serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the test's device go where tensors of a GPU go."""
    monkeypatch.setattr(gpu, "serves", lambda device: device.type == DEVICE)
    if DEVICE == "cpu":
        monkeypatch.setattr(gpu, "place", lambda x, device: x)


def table_of(
    K: int, columns: tuple[int, ...], ranks: tuple[tuple[int, ...], ...], dtype: torch.dtype, looks_up: bool = False
) -> LoraTable:
    """Random adapters; rank 0: none."""
    random = torch.Generator().manual_seed(0)
    table = LoraTable(len(ranks), 64, K, columns, dtype, torch.device(DEVICE), looks_up=looks_up)
    for slot, of_parts in enumerate(ranks):
        deltas = []
        for part, rank in enumerate(of_parts):
            a = (torch.randn(rank, K, generator=random) / K**0.5).to(dtype).to(DEVICE)
            b = (torch.randn(columns[part], rank, generator=random) / max(rank, 1) ** 0.5).to(dtype).to(DEVICE)
            deltas.append(pack_delta(a, b, 0.5 + part + slot, looks_up=looks_up) if rank else None)
        table.set(slot, deltas)
    return table


def inputs(T: int, K: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    base = torch.randn(T, N + 5, generator=random)[:, :N]
    return base.to(DEVICE), torch.randn(T, K + 3, generator=random).to(dtype).to(DEVICE)[:, :K]


@pytest.mark.parametrize(
    ("dtype", "x_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16)],
)
def test_equals_twin(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    """Mixed rows, a prompt of one adapter, rows without any; parts without a delta, ranks that fill no block."""
    table = table_of(150, (70, 16, 5), ((16, 3, 40), (0, 1, 0), (0, 0, 0)), dtype)
    for T, slots in ((1, [0]), (20, [-1, 0, 1, 2] * 5), (33, [0] * 30 + [-1] * 3), (5, [-1] * 5)):
        base, x = inputs(T, 150, 91, x_dtype)
        slots_T = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        got = add_lora(base, x, slots_T, table, x_dtype)
        want = reference.add_lora(base, x, slots_T, table, torch.float32)
        atol, rtol = TOLERANCES[x_dtype]
        torch.testing.assert_close(got.float(), want, atol=atol, rtol=rtol)
        rows = [*range(T)] if IS_FULL else sorted({0, 1 % T, 2 % T, 3 % T, T - 1})  # of every slot
        alone = [add_lora(base[t : t + 1], x[t : t + 1], slots_T[t : t + 1], table, x_dtype) for t in rows]
        assert torch.equal(got[rows], torch.cat(alone))


def test_embeddings() -> None:
    table = table_of(33, (20,), ((4,), (17,)), torch.float32, looks_up=True)
    base, _ = inputs(6, 33, 20, torch.float32)
    ids = torch.tensor([0, 32, 5, 5, 1, 7], device=DEVICE)
    slots_T = torch.tensor([0, 1, -1, 1, 0, 0], dtype=torch.int32, device=DEVICE)
    want = reference.add_lora(base, ids, slots_T, table, torch.float32)
    torch.testing.assert_close(add_lora(base, ids, slots_T, table, torch.float32), want, atol=2e-5, rtol=2e-5)


def test_in_place() -> None:
    table = table_of(16, (20,), ((4,),), torch.float32)
    base, x = inputs(3, 16, 20, torch.float32)
    slots_T = torch.tensor([0, -1, 0], dtype=torch.int32, device=DEVICE)
    want = add_lora(base, x, slots_T, table, torch.float32)
    own = base.clone()
    assert torch.equal(add_lora(own, x, slots_T, table, torch.float32, own), want)
