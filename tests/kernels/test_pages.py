"""Weights in bands, pages of mapped files that are given back, and scratch memory."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels import pages
from quire.kernels.dense import linear, pack_linear
from quire.kernels.fp8 import fp8_rows, pack_fp8, pack_fp8_bands, quantize_fp8
from quire.kernels.grouped import grouped_rows, pack_grouped, pack_grouped_bands, quantize_grouped
from quire.kernels.memory_piece import MemoryPiece
from quire.quantization.scheme import ShardedTensor


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_THREAD_BAND_BYTES", 1)


@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_bands_are_packed_as_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK, rows_N = torch.randn(rows, 96), torch.arange(rows)
    bands = list(pages.row_bands(weight_NK))
    assert [len(band) for band in bands] == [64] * (rows // 64) + [rows % 64] * (rows % 64 > 0)
    assert torch.equal(torch.cat(bands), weight_NK)

    whole = pack_grouped(quantize_grouped(weight_NK, 4, 32))
    banded = pack_grouped_bands((quantize_grouped(band, 4, 32) for band in bands), rows)
    assert (banded.N, banded.K, banded.format) == (whole.N, whole.K, whole.format)
    assert torch.equal(grouped_rows(banded, rows_N, torch.float32), grouped_rows(whole, rows_N, torch.float32))
    fp8, fp8_banded = pack_fp8(quantize_fp8(weight_NK)), pack_fp8_bands(map(quantize_fp8, bands), rows)
    assert torch.equal(fp8_rows(fp8_banded, rows_N, torch.float32), fp8_rows(fp8, rows_N, torch.float32))

    x_TK = torch.randn(3, 96)
    in_bands_TN = linear(x_TK, pack_linear(weight_NK))
    monkeypatch.setattr(pages, "_THREAD_BAND_BYTES", 1 << 20)
    assert torch.equal(in_bands_TN, linear(x_TK, pack_linear(weight_NK)))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may keep a page that was written to")
def test_released_pages_come_from_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("rb") as file:
        mapped = torch.frombuffer(pages.map_file(file), dtype=torch.uint8)
    expected = mapped.clone()
    mapped[5000] += 1  # of the private copy: gone when its page is
    pages.release(mapped[4096:8192])
    assert torch.equal(mapped, expected)
    assert torch.equal(pages.copied(mapped.view(128, 128), torch.int32).flatten(), expected.int())


def test_memory_of_others_is_not_released() -> None:
    tensor = torch.arange(1 << 14)
    expected = tensor.clone()
    pages.release(tensor)
    pages.release(tensor[::2])
    assert torch.equal(tensor, expected)


def test_scratch_is_used_again_when_nothing_is_in_it() -> None:
    pages.trim()
    first = pages.scratch((10, 10), torch.float32)
    other = pages.scratch((10, 10), torch.float32)
    view, address = first[5:], first.data_ptr()
    del first
    assert pages.scratch((10, 10), torch.float32).data_ptr() not in (address, other.data_ptr())
    view.fill_(3)
    pages.trim()
    assert (view == 3).all(), "held by a view"
    del view, other
    first = pages.scratch((10, 10), torch.float32)
    address = first.data_ptr()
    del first
    assert pages.scratch((25,), torch.uint8).data_ptr() == address


def test_threads_do_not_take_the_same_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowPiece(MemoryPiece):
        @property
        def is_free(self) -> bool:
            found = super().is_free
            time.sleep(1e-3)  # others look too
            return found

    def take(_: int) -> Tensor:
        barrier.wait()
        return pages.scratch((64,), torch.int32)

    monkeypatch.setattr(pages, "MemoryPiece", SlowPiece)
    monkeypatch.setattr(pages, "_scratch", [])
    pages.scratch((64,), torch.int32)  # a free piece
    barrier = threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(take, range(4)))
    assert len({tensor.data_ptr() for tensor in taken}) == 4


def test_a_thread_that_has_loaded_takes_no_scratch_memory_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives memory back while another one looks for some."""
    others: list[threading.Thread] = []

    class Watched(MemoryPiece):
        @property
        def is_free(self) -> bool:
            others.append(threading.Thread(target=pages.trim))
            others[-1].start()
            others[-1].join(0.05)
            return super().is_free

    monkeypatch.setattr(pages, "MemoryPiece", Watched)
    monkeypatch.setattr(pages, "_scratch", [])
    pages.scratch((64,), torch.int32)  # a free piece, which is too small
    assert pages.scratch((1 << 20,), torch.int32).shape == (1 << 20,)
    assert len(others) == 1
    others[0].join()
    assert not pages._scratch


def test_what_is_kept_holds_no_scratch_memory() -> None:
    """A fused bias would else keep memory that was made for a weight, one for each layer."""
    pages.trim()
    large = pages.scratch((1 << 20,), torch.uint8)
    address = large.data_ptr()
    del large
    tensor = ShardedTensor([(3,), (2,)], torch.float32)
    for shard, size in enumerate((3, 2)):
        tensor.load(shard, torch.ones(size))
    kept = tensor.owned
    assert kept.untyped_storage().nbytes() == kept.nbytes
    assert pages.scratch((1 << 20,), torch.uint8).data_ptr() == address


def test_pieces_of_any_size_are_packed_as_the_whole() -> None:
    for sizes in ((64, 32), (40, 64, 24)):
        weight_NK = torch.randn(sum(sizes), 16)
        tensor = ShardedTensor([(size, 16) for size in sizes], torch.bfloat16)
        for shard, piece in reversed(list(enumerate(weight_NK.split(sizes)))):
            tensor.load(shard, piece)
        bands = list(tensor.row_bands())
        assert torch.equal(torch.cat(bands), weight_NK.bfloat16())
        assert torch.equal(tensor.whole, weight_NK.bfloat16())
        assert all(len(band) % 64 == 0 for band in bands[:-1])
