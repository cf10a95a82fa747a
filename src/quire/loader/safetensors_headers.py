"""The headers of safetensors checkpoints, checked before use. No torch: the API process reads them too.

Format (https://huggingface.co/docs/safetensors): 8 bytes header length N, little endian; N bytes of JSON,
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, offsets counted from the end of the header; then the data.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quire.errors import WeightsError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Limits for untrusted files. The largest published checkpoints stay under a tenth of them.
MAX_HEADER_BYTES = 16 << 20
MAX_ENTRIES = 65_536
MAX_DIMS = 16
MAX_ELEMENTS = (1 << 59) - 1  # torch counts bytes and strides in 64 bits
# A parsed header takes up to 30 times its bytes, so its brackets and values are counted first. A matrix has 3 brackets,
# and 9 commas and colons with the comma after it.
MAX_BRACKETS = 4 * MAX_ENTRIES
MAX_VALUES = 16 * MAX_ENTRIES

# The format's name -> torch's, and the bytes of an element.
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}

_AGAIN = "Download the file again or compare its checksum with the publisher's"
_SHARD_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of one tensor; begin and end are bytes from the start of its file, dtype is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_headers(folder: Path) -> dict[Path, list[TensorEntry]]:
    """Find and check all weight files of a folder: files in name order, tensors in the order of their places.

    Raises:
        WeightsError: no safetensors, a missing shard, an index that does not fit its shards, or a malformed file.
    """
    if (folder / SINGLE_NAME).is_file() or not (folder / INDEX_NAME).is_file():
        paths, weight_map = _files_without_index(folder), None
    else:
        weight_map = _read_index(folder)
        paths = [folder / name for name in sorted(set(weight_map.values()))]
        for path in paths:
            if not path.is_file():
                raise WeightsError(
                    f"Shard {path.name} is missing",
                    expected=f"all {len(paths)} files that {INDEX_NAME} names",
                    fix="Download the model again: an interrupted download continues where it stopped",
                )
    files = {path: read_header(path) for path in paths}
    _check_names(files, weight_map)
    return files


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of one file in file order. Raises WeightsError unless all declared sizes fit the file exactly."""
    if not path.is_file():
        raise WeightsError(f"{path.name} is no regular file", fix="Put the file itself there")  # a pipe would block
    with path.open("rb") as file:
        return read_open_header(file, path)


def read_open_header(file: BinaryIO, path: Path) -> list[TensorEntry]:
    """`read_header` of a file that is open at its start."""
    if hasattr(os, "posix_fadvise"):  # so that Linux does not read the tensors after the header ahead
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    size = os.fstat(file.fileno()).st_size
    raw = _read_raw(file, path, size)
    header = _parse_json(path, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise WeightsError(f"{path.name}: __metadata__ is not an object", value=metadata, fix=_AGAIN)
    if len(header) > MAX_ENTRIES:
        raise WeightsError(
            f"{path.name} declares too many tensors", value=len(header), expected=f"at most {MAX_ENTRIES}", fix=_AGAIN
        )
    data_start = 8 + len(raw)
    entries = [_parse_entry(path, name, fields, data_start) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_places(entries, path, data_start, size)
    return entries


def _read_raw(file: BinaryIO, path: Path, size: int) -> bytes:
    """The bytes of the header, after its length. The file has `size` bytes."""
    start = file.read(8)
    if start.startswith(b"version "):
        raise WeightsError(
            f"{path.name} is a Git LFS pointer, not the weights", fix="Run `git lfs pull` in the model's folder"
        )
    if len(start) < 8:
        raise WeightsError(f"{path.name} is truncated", value=f"{size} bytes", expected="at least 8 bytes", fix=_AGAIN)
    header_bytes = int.from_bytes(start, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise WeightsError(
            f"{path.name} declares an oversized header",
            value=header_bytes,
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            fix=_AGAIN,
        )
    if header_bytes > size - 8:
        raise WeightsError(
            f"{path.name} is truncated inside its header",
            value=f"{size} bytes",
            expected=f"at least {8 + header_bytes} bytes",
            fix=_AGAIN,
        )
    return file.read(header_bytes)


def _check_places(entries: Sequence[TensorEntry], path: Path, data_start: int, size: int) -> None:
    """Raise WeightsError unless these sorted entries fill the file from `data_start` to its end."""
    position = data_start
    for entry in entries:
        if entry.begin != position:
            problem = "overlaps the tensor before it" if entry.begin < position else "leaves a gap before it"
            raise WeightsError(
                f"{path.name}: tensor {entry.name} {problem}",
                value=entry.begin - data_start,
                expected=f"offset {position - data_start}",
                fix=_AGAIN,
            )
        position = entry.end
        if position > size:
            raise WeightsError(
                f"{path.name} is truncated inside tensor {entry.name}",
                value=f"{size} bytes",
                expected=f"at least {position} bytes",
                fix=_AGAIN,
            )
    if position != size:
        raise WeightsError(
            f"{path.name} has bytes that belong to no tensor",
            value=f"{size} bytes",
            expected=f"{position} bytes",
            fix=_AGAIN,
        )


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise WeightsError(f"{path.name} names a key twice", value=twice, fix=_AGAIN)
        return fields

    if raw.count(b"{") + raw.count(b"[") > MAX_BRACKETS or raw.count(b",") + raw.count(b":") > MAX_VALUES:
        raise WeightsError(
            f"The header of {path.name} holds more than {MAX_ENTRIES} tensors and their metadata can need",
            value=f"{len(raw)} bytes",
            expected="a name, a dtype, a shape and offsets for each tensor, and a little text about the file",
            fix=_AGAIN,
        )
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path.name}: not valid JSON ({error})", value=raw[:40], fix=_AGAIN) from error
    if not isinstance(parsed, dict):
        raise WeightsError(f"{path.name}: not a JSON object", value=raw[:40], fix=_AGAIN)
    return parsed


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _parse_entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    def fail(what: str, value: Any, expected: str) -> WeightsError:
        return WeightsError(f"{path.name}: tensor {name} {what}", value=value, expected=expected, fix=_AGAIN)

    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise fail("is not described", fields, "dtype, shape and data_offsets")
    named = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if named is None:
        raise fail("has an unknown dtype", fields["dtype"], f"one of {', '.join(DTYPES)}")
    dtype, num_bytes_each = named
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not (isinstance(shape, list) and len(shape) <= MAX_DIMS and all(map(_is_size, shape))):
        raise fail("has a malformed shape", shape, f"a list of at most {MAX_DIMS} sizes")
    if not (
        isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets)) and offsets[0] <= offsets[1]
    ):
        raise fail("has malformed data_offsets", offsets, "[begin, end] with 0 <= begin <= end")
    num_bytes = math.prod(shape) * num_bytes_each
    if num_bytes != offsets[1] - offsets[0]:
        raise fail(
            "has a shape that does not fit its bytes", offsets, f"{num_bytes} bytes for {fields['dtype']}{shape}"
        )
    if (
        math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS
    ):  # a size of 0 hides the others from the number of bytes
        raise fail("has a shape that is too large", shape, f"a product of at most {MAX_ELEMENTS}")
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_NAME
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise WeightsError(f"{path.name} is too large", expected=f"at most {MAX_HEADER_BYTES} bytes", fix=_AGAIN)
    weight_map = _parse_json(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(
            f"{path.name} has no usable weight_map", value=weight_map, expected="an object: tensor to file name"
        )
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise WeightsError(
                f"{path.name}: tensor {tensor} is said to be in an illegal file",
                value=file,
                expected="the name of a .safetensors file beside the index",
            )
    return weight_map


def _files_without_index(folder: Path) -> list[Path]:
    """The single file, or shards with names that give a complete set."""
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    found = sorted(
        path for path in folder.glob("*.safetensors") if not path.name.startswith(("adapter_", "consolidated"))
    )
    shards = [match for path in found if (match := _SHARD_NAME.fullmatch(path.name))]
    if shards:
        count = int(shards[0][2])
        missing = [n for n in range(1, count + 1) if n not in {int(match[1]) for match in shards}]
        if missing:
            raise WeightsError(
                f"Shard model-{missing[0]:05}-of-{count:05}.safetensors is missing",
                expected=f"{count} shards",
                fix="Download the model again: an interrupted download continues where it stopped",
            )
        return [folder / match[0] for match in shards]
    if len(found) == 1:
        return found
    if found:
        raise WeightsError(
            f"Several .safetensors files and no {INDEX_NAME}",
            value=[path.name for path in found],
            expected=f"{SINGLE_NAME}, or shards with their index",
        )
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLED)
    if pickled:
        raise WeightsError(
            "The weights are in a pickle format, which can run code when it is read",
            value=pickled,
            expected="safetensors",
            fix="If you trust the file, convert it once with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    raise WeightsError(
        f"No weights in {folder}",
        value=sorted(path.name for path in folder.glob("*"))[:20],
        expected=f"{SINGLE_NAME} or {INDEX_NAME}",
        fix="Download the model again, or try the engine without weights: --load-format dummy",
    )


def _check_names(files: dict[Path, list[TensorEntry]], weight_map: dict[str, str] | None) -> None:
    """Check that no tensor is in two files, and that the index and its shards have the same tensors."""
    where: dict[str, str] = {}
    for path, entries in files.items():
        for entry in entries:
            if entry.name in where:
                raise WeightsError(f"Tensor {entry.name} is in {where[entry.name]} and in {path.name}", fix=_AGAIN)
            where[entry.name] = path.name
    for tensor, file in (weight_map or {}).items():
        if where.get(tensor) != file:
            raise WeightsError(
                f"{INDEX_NAME} says that tensor {tensor} is in {file}",
                value=f"it is in {where[tensor]}" if tensor in where else "it is in no shard",
                fix="Download index and shards again: they are from different revisions",
            )
