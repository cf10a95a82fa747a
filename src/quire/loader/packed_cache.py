"""Packed weights in a file. The next start maps it instead of reading, converting and packing the checkpoint.

A file is used only if nobody else can write to its folder, its header is whole, and it has the expected key. The key
has the identities of the checkpoint's files, the model's config, the format, and the code that packed. Another file is
ignored and written anew. There is one file per model folder and format.

File: 8 bytes magic; length of the header (8 bytes, little endian) and its SHA-256; the header, JSON; then, from the
next multiple of HUGE_PAGE, the tensors, each at a multiple of ALIGNMENT from there.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import struct
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quire import extension
from quire.formats.weight_format import GroupedFormat
from quire.kernels import cpu
from quire.kernels.dense import PackedLinear
from quire.kernels.expert_stack import Packed, PackedStack
from quire.kernels.fp8 import PackedFp8
from quire.kernels.grouped import PackedGrouped
from quire.kernels.head_linear import PackedHeads
from quire.loader.safetensors_headers import MAX_HEADER_BYTES
from quire.logs import get_logger
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.private_cache import cache_folder, check_private, code_identity, digest, file_identity, open_private
from quire.resolve import shown_bytes

logger = get_logger(__name__)

MAGIC = b"QUIREPK1"
PREFIX = struct.Struct("<8sQ32s")
ALIGNMENT = 4096
HUGE_PAGE = 2 << 20
MADV_POPULATE_READ = 22  # asm-generic/mman-common.h; not in Python 3.11
PIECE_BYTES = 64 << 20  # bytes between two reports of progress
THREAD_NAME = "packed weights"
_FORMS = (PackedLinear, PackedGrouped, PackedFp8, PackedStack, PackedHeads, GroupedFormat)
FORMS = {form.__name__: form for form in _FORMS}

Held = Mapping[str, Mapping[str, Any]]  # a model's loaded weights by part and attribute


class PackedCache:
    """The file of one model in one format.

    Args:
        files: the files of the checkpoint.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, quantization: str | None, files: Iterable[Path]
    ) -> None:
        form = f"{dtype} {quantization}"
        if (share := config.vocab_share) is not None:
            form += f" rank {share.rank} of {len(share.rows[0])}"
        own = None
        if (stage := config.stage) is not None:
            own = dataclasses.replace(stage, streams=())  # no weight depends on what a head reads
            form += f" stage {stage.index} of {stage.num_stages}"
            form += " with embeddings" if stage.is_last and stage.has_embeddings else ""
        self._key = {
            "files": [file_identity(path) for path in files],
            "config": digest(repr(dataclasses.replace(config, max_model_len=0, stage=own))),
            "form": form,
            "code": code_identity(extension.C.__file__),
        }
        self._path = folder() / f"{digest(f'{Path(config.model).resolve()} {form}')[:32]}.packed"
        self.mapped_bytes = 0  # set by `read`: this memory is in use, but the system counts it as free

    def read(self, progress: Progress | None = None) -> Held | None:
        """The weights for this key, mapped; None if there is no valid file."""
        try:
            check_private(self._path.parent)
            with open_private(self._path) as file:
                header = self._header(file)
                held = _map(file, header, progress)
            self.mapped_bytes = header["num_bytes"]
            return held
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.info("packed weights in %s are not used: %s", self._path, error)
            return None

    def _header(self, file: BinaryIO) -> dict[str, Any]:
        """The header. Raises ValueError for a file that is damaged or has another key."""
        prefix = file.read(PREFIX.size)
        if len(prefix) < PREFIX.size:
            raise ValueError("the file is cut")
        magic, length, digest = PREFIX.unpack(prefix)
        if magic != MAGIC or length > MAX_HEADER_BYTES:
            raise ValueError("the file is of another kind")
        raw = file.read(length)
        if hashlib.sha256(raw).digest() != digest:
            raise ValueError("the header is damaged")
        header: dict[str, Any] = json.loads(raw)
        if header["key"] != self._key:
            raise ValueError("the model, its format or this program has changed")
        header["start"] = _data_start(length)
        if header["start"] + header["num_bytes"] != os.fstat(file.fileno()).st_size:
            raise ValueError("the file is cut")
        return header

    def write(self, held: Held, progress: Progress | None = None) -> None:
        """Keep a model's weights for the next start. A failure is only logged: the model runs without the file.

        The system has all bytes when this returns. The file gets its name when they are on the disk.
        """
        tensors: list[Tensor] = []
        try:
            parts = {
                name: {key: _described(value, tensors) for key, value in part.items()} for name, part in held.items()
            }
        except TypeError as error:
            logger.warning("packed weights are not kept: %s", error)
            return
        num_bytes = sum(_padded(tensor.nbytes) for tensor in tensors)
        header = json.dumps({"key": self._key, "parts": parts, "num_bytes": num_bytes}).encode()
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self._path.parent)
            if shutil.disk_usage(self._path.parent).free < 2 * num_bytes:
                logger.warning("packed weights are not kept: less than %s are free", shown_bytes(2 * num_bytes))
                return
            scratch = self._path.with_suffix(".writing")
            if (file := _open_locked(scratch)) is None:
                return  # another process writes the same
            try:
                os.ftruncate(file, 0)
                _write_all(file, PREFIX.pack(MAGIC, len(header), hashlib.sha256(header).digest()) + header, 0)
                _write_tensors(file, tensors, _data_start(len(header)), progress)
            except BaseException:
                scratch.unlink()
                os.close(file)
                raise
        except OSError as error:
            logger.warning("packed weights are not kept: %s", error)
            return
        threading.Thread(target=self._publish, args=(file, scratch, num_bytes), name=THREAD_NAME, daemon=True).start()

    def _publish(self, file: int, scratch: Path, num_bytes: int) -> None:
        try:
            os.fsync(file)  # a file with a name is whole, also after a power failure
            scratch.replace(self._path)
            logger.info("%s of packed weights are kept for the next start: %s", shown_bytes(num_bytes), self._path)
        except OSError as error:
            logger.warning("packed weights are not kept: %s", error)
        finally:
            os.close(file)


def folder() -> Path:
    """The folder of packed weights. Raises ConfigError if no place for it can be found."""
    return cache_folder("packed-weights", "packed weights")


def _open_locked(path: Path) -> int | None:
    """A file for this process alone; None if another process writes it or has just renamed it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_ino == path.stat().st_ino:
            return file
    os.close(file)
    return None


def _data_start(header_bytes: int) -> int:
    return -(-(PREFIX.size + header_bytes) // HUGE_PAGE) * HUGE_PAGE


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """JSON for one attribute. Its tensors are appended to `tensors`, in the order of the file. Raises TypeError."""
    if isinstance(value, Tensor):
        begin = sum(_padded(tensor.nbytes) for tensor in tensors)
        tensors.append(value.contiguous())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), begin]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [_described(item, tensors) for item in value]}
    if (name := type(value).__name__) in FORMS:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"form": name, "fields": {key: _described(item, tensors) for key, item in fields.items()}}
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"no file is written of {name}")
    return value


def _restored(description: Any, data: Tensor) -> Any:
    if not isinstance(description, dict):
        return description
    if "dtype" in description:
        return _dtype(description["dtype"])
    if "tuple" in description:
        return tuple(_restored(item, data) for item in description["tuple"])
    if "form" in description:
        fields = {key: _restored(item, data) for key, item in description["fields"].items()}
        return FORMS[description["form"]](**fields)
    name, shape, begin = description["tensor"]
    dtype = _dtype(name)
    end = begin + torch.Size(shape).numel() * dtype.itemsize
    if not 0 <= begin <= end <= len(data) or begin % ALIGNMENT:
        raise ValueError("a tensor lies outside the file")
    return data[begin:end].view(dtype).view(shape)


def _checked(value: Any) -> Any:
    """The value of an attribute. Raises ValueError for sizes that do not fit its data, because kernels believe them."""
    match value:
        case tuple():
            for each in value:
                _checked(each)
        case PackedStack(weight, E, N, K):
            if (weight.N, weight.K) != (E * N, K):
                raise ValueError("the sizes of experts do not fit their weight")
            _check_weight(weight, E, N, (E, K))
        case PackedLinear() | PackedFp8() | PackedGrouped():
            _check_weight(value, 1, value.N, (value.K,))
        case PackedHeads(data, H, N, K, dtype):
            _check_length(data, H * cpu.gemm_packed_bytes(dtype, N, K))
    return value


def _check_weight(weight: Packed, count: int, N: int, order_shape: tuple[int, ...]) -> None:
    """`count` weights of N rows, one after the other."""
    if isinstance(weight, PackedLinear):
        num_bytes = cpu.gemm_packed_bytes(weight.dtype, N, weight.K)
    elif isinstance(weight, PackedFp8):
        num_bytes = cpu.fp8_packed_bytes(N, weight.K, weight.group_size)
    else:
        num_bytes = cpu.grouped_packed_bytes(N, weight.K, cpu.grouped_form(weight.format))
    _check_length(weight.data, count * num_bytes)
    order = weight.order_K if isinstance(weight, PackedGrouped) else None
    if order is not None:
        columns = torch.arange(weight.K)
        if order.shape != order_shape or 0 in order_shape or not (order.sort(-1).values == columns).all():
            raise ValueError("the order of a weight's in-features is damaged")


def _check_length(data: Tensor | None, num_bytes: int) -> None:
    if data is None or data.nbytes != num_bytes:
        raise ValueError("the data of a weight has another length than its sizes need")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def _map(file: BinaryIO, header: dict[str, Any], progress: Progress | None) -> Held:
    # Private and writable: torch takes the buffer without a warning, and the file cannot be changed through it.
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    for begin in range(0, len(data), PIECE_BYTES):
        end = min(begin + PIECE_BYTES, len(data))
        with suppress(OSError):  # Linux before 5.14 maps pages only when they are first read
            mapped.madvise(MADV_POPULATE_READ, begin, end - begin)
        if progress:
            progress("load", end / len(data), f"{shown_bytes(end)} of {shown_bytes(len(data))}, packed before")
    return {
        name: {key: _checked(_restored(description, data[header["start"] :])) for key, description in part.items()}
        for name, part in header["parts"].items()
    }


def _write_tensors(file: int, tensors: list[Tensor], position: int, progress: Progress | None) -> None:
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    for tensor in tensors:
        raw = tensor.view(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(raw), PIECE_BYTES):
            _write_all(file, raw[begin : begin + PIECE_BYTES], position + begin)
        position += _padded(len(raw))
        done += len(raw)
        if progress:
            progress("load", 1.0, f"keeping {shown_bytes(done)} of {shown_bytes(total)} for later starts")
    os.ftruncate(file, position)


def _write_all(file: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written
