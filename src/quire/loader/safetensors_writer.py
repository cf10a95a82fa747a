"""Writes safetensors files. A file gets its name only when it is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from quire.loader.safetensors_headers import DTYPES

_NAMES = {getattr(torch, dtype): name for name, (dtype, _) in DTYPES.items()}
PARTIAL = ".partial"  # suffix of an incomplete file
_ALIGNMENT = 8  # the data is aligned, because readers map it


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in their order, with the metadata that transformers needs."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)

    def write(file: BinaryIO) -> None:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)

    write_whole(path, write)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under another name, sync it to the disk, and give it its name."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
