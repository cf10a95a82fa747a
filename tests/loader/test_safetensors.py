"""A broken checkpoint gives a WeightsError that names the file; a good one comes back bit for bit."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import WeightsError
from quire.loader import safetensors, safetensors_headers
from quire.loader.safetensors import open_checkpoint
from quire.loader.safetensors_headers import INDEX_NAME, SINGLE_NAME, read_header

WEIGHTS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.bias": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
    "c.weight": torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(torch.float16),
    "d.scalar": torch.tensor(42, dtype=torch.int64),
}


def pack(header: object, data: bytes = b"", *, header_bytes: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + data


def entry(begin: int, end: int, shape: object = None, dtype: object = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def write_sharded(folder: Path, shards: dict[str, list[str]], weight_map: dict[str, str] | None = None) -> None:
    for file, names in shards.items():
        save_file({name: WEIGHTS[name] for name in names}, folder / file)
    if weight_map is None:
        weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


TWO_SHARDS = {
    "model-00001-of-00002.safetensors": ["a.weight", "b.bias"],
    "model-00002-of-00002.safetensors": ["c.weight", "d.scalar"],
}


def assert_same(loaded: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == WEIGHTS.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == WEIGHTS[name].dtype, name
        assert torch.equal(tensor, WEIGHTS[name]), name


def test_single_file_is_read_bit_for_bit_and_in_file_order(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / SINGLE_NAME)
    checkpoint = open_checkpoint(tmp_path)
    loaded = dict(checkpoint.tensors())
    assert_same(loaded)
    begins = [item.begin for item in checkpoint.files[tmp_path / SINGLE_NAME]]
    assert begins == sorted(begins)
    assert list(loaded) == checkpoint.names


def test_sharded_checkpoint_with_progress(tmp_path: Path) -> None:
    write_sharded(tmp_path, TWO_SHARDS)
    seen: list[tuple[str, float, str]] = []
    checkpoint = open_checkpoint(tmp_path)
    assert_same(dict(checkpoint.tensors(lambda *report: seen.append(report))))
    assert len(seen) == sum(len(tensors) for tensors in TWO_SHARDS.values())
    fractions = [fraction for _, fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in WEIGHTS.values())


def test_complete_shards_without_an_index_are_read(tmp_path: Path) -> None:
    write_sharded(tmp_path, TWO_SHARDS)
    (tmp_path / INDEX_NAME).unlink()
    assert_same(dict(open_checkpoint(tmp_path).tensors()))


def test_a_view_stays_valid_after_its_pages_were_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "READ_AHEAD_BYTES", 1 << 16)
    generator = torch.Generator().manual_seed(1)
    weights = {f"layer{i}": torch.randn(64, 1024, generator=generator) for i in range(16)}
    save_file(weights, tmp_path / SINGLE_NAME)
    held = list(open_checkpoint(tmp_path).tensors())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in held)


def test_writing_to_a_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / SINGLE_NAME)
    before = (tmp_path / SINGLE_NAME).read_bytes()
    for _, tensor in open_checkpoint(tmp_path).tensors():
        tensor.zero_()
    assert (tmp_path / SINGLE_NAME).read_bytes() == before


@pytest.mark.parametrize("padding", [1, 3])
def test_unaligned_data_is_copied(tmp_path: Path, padding: int) -> None:
    raw = json.dumps({"x": entry(0, 8, [2], "F32")}).encode()
    raw += b" " * ((padding - len(raw)) % 8)
    (tmp_path / SINGLE_NAME).write_bytes(pack(raw, struct.pack("<2f", 1.5, -2.5)))
    tensor = dict(open_checkpoint(tmp_path).tensors())["x"]
    assert tensor.tolist() == [1.5, -2.5]
    assert tensor.data_ptr() % tensor.element_size() == 0


def test_empty_tensors_and_metadata(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "none": entry(0, 0, [0, 3], "F32"), "x": entry(0, 2)}
    (tmp_path / SINGLE_NAME).write_bytes(pack(header, b"\x01\x02"))
    loaded = dict(open_checkpoint(tmp_path).tensors())
    assert loaded["none"].shape == (0, 3)
    assert loaded["x"].tolist() == [1, 2]


def good_file() -> bytes:
    return pack({"x": entry(0, 4), "y": entry(4, 12, [2], "F32")}, bytes(12))


def test_truncation_at_every_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_NAME
    for kept in range(len(good_file())):
        path.write_bytes(good_file()[:kept])
        with pytest.raises(WeightsError, match=SINGLE_NAME):
            read_header(path)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_flipped_bytes(seed: int, tmp_path: Path) -> None:
    """A changed header gives tensors that fill the file without overlap, or a WeightsError, and nothing else."""
    draw = random.Random(seed)
    whole, path = good_file(), tmp_path / SINGLE_NAME
    header_end = len(whole) - 12
    refused = 0
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(header_end)] = draw.choice((*b'019-.eE[]{},:"', 0, 0x7F, 0x80, draw.randrange(256)))
        path.write_bytes(bytes(data))
        try:
            loaded = dict(open_checkpoint(tmp_path).tensors())
        except WeightsError:
            refused += 1
            continue
        assert sum(tensor.nbytes for tensor in loaded.values()) == 12
    assert 300 < refused < 1000


BROKEN: dict[str, tuple[bytes, str]] = {
    "header larger than 16 MB": (pack(b"{}", header_bytes=(16 << 20) + 1), "oversized header"),
    "header length 2**63": (pack(b"{}", header_bytes=1 << 63), "oversized header"),
    "header longer than the file": (pack(b"{}", header_bytes=1000), "truncated inside its header"),
    "not JSON": (pack(b"{nothing}"), "not valid JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "not valid JSON"),
    "deep nesting": (pack(b"[" * 200_000), "not valid JSON"),
    "huge integer": (pack(b'{"x": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "not an object": (pack([1, 2]), "not a JSON object"),
    "duplicate tensor": (
        pack(
            b'{"x": {"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"x": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"1",
        ),
        "names a key twice. Got 'x'",
    ),
    "duplicate field": (
        pack(b'{"x": {"dtype":"U8","shape":[9],"shape":[1],"data_offsets":[0,1]}}', b"1"),
        "names a key twice. Got 'shape'",
    ),
    "too many tensors": (pack({f"t{i}": entry(0, 0) for i in range(65_537)}), "too many tensors. Got 65537"),
    "metadata is a list": (pack({"__metadata__": [1]}), "__metadata__"),
    "entry is a number": (pack({"x": 3}), "tensor x is not described"),
    "no offsets": (pack({"x": {"dtype": "U8", "shape": [1]}}), "tensor x is not described"),
    "unknown dtype": (pack({"x": entry(0, 1, dtype="F4")}, b"1"), "tensor x has an unknown dtype. Got 'F4'"),
    "dtype is a list": (pack({"x": entry(0, 1, dtype=["U8"])}, b"1"), "unknown dtype"),
    "negative size": (pack({"x": entry(0, 1, [-1])}, b"1"), "malformed shape"),
    "boolean size": (pack({"x": entry(0, 1, [True])}, b"1"), "malformed shape"),
    "fractional size": (pack({"x": entry(0, 1, [1.0])}, b"1"), "malformed shape"),
    "too many dimensions": (pack({"x": entry(0, 1, [1] * 17)}, b"1"), "malformed shape"),
    "shape is a string": (pack({"x": entry(0, 1, "1")}, b"1"), "malformed shape"),
    "offsets swapped": (pack({"x": entry(4, 0, [4])}, bytes(4)), "malformed data_offsets"),
    "negative offset": (pack({"x": entry(-4, 0, [4])}, bytes(4)), "malformed data_offsets"),
    "three offsets": (pack({"x": {**entry(0, 1), "data_offsets": [0, 1, 2]}}, b"1"), "malformed data_offsets"),
    "shape larger than bytes": (pack({"x": entry(0, 4, [2], "F32")}, bytes(4)), "does not fit its bytes"),
    "shape smaller than bytes": (pack({"x": entry(0, 12, [2], "F32")}, bytes(12)), "does not fit its bytes"),
    "shape product overflows 64 bits": (
        pack({"x": entry(0, 1000, [2, 2**63 + 500])}, bytes(1000)),
        "does not fit its bytes",
    ),
    "no elements, but strides beyond 64 bits": (
        pack({"x": entry(0, 0, [2**62, 4, 0])}),
        "tensor x has a shape that is too large",
    ),
    "no elements, but a size beyond 64 bits": (
        pack({"x": entry(0, 0, [2**63, 0])}),
        "tensor x has a shape that is too large",
    ),
    "overlap": (pack({"x": entry(0, 4), "y": entry(2, 6)}, bytes(6)), "tensor y overlaps"),
    "same bytes twice": (pack({"x": entry(0, 4), "y": entry(0, 4)}, bytes(4)), "overlaps"),
    "gap": (pack({"x": entry(0, 4), "y": entry(6, 8)}, bytes(8)), "tensor y leaves a gap"),
    "gap at the start": (pack({"x": entry(1, 4)}, bytes(4)), "tensor x leaves a gap"),
    "data missing": (pack({"x": entry(0, 4), "y": entry(4, 9)}, bytes(8)), "truncated inside tensor y"),
    "declares terabytes": (pack({"x": entry(0, 1 << 42)}, b"1"), "truncated inside tensor x"),
    "trailing bytes": (pack({"x": entry(0, 4)}, bytes(9)), "belong to no tensor"),
    "data without tensors": (pack({}, bytes(9)), "belong to no tensor"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    (tmp_path / SINGLE_NAME).write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)
    assert SINGLE_NAME in str(caught.value)


BOMBS = {
    "objects": (b'{"x":[', b"{},", b"1]}"),
    "arrays": (b'{"x":[', b"[],", b"1]}"),
    "numbers": (b'{"x":[', b"1000,", b"1]}"),
    "metadata": (b'{"__metadata__":{', b'"":"",', b'"":""}}'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_that_grows_is_not_parsed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MB would become half a gigabyte of objects."""
    before, piece, after = BOMBS[name]
    count = (safetensors_headers.MAX_HEADER_BYTES - len(before) - len(after)) // len(piece)
    path = tmp_path / SINGLE_NAME
    path.write_bytes(pack(before + piece * count + after))
    monkeypatch.setattr(json, "loads", lambda *arguments, **options: pytest.fail("it was parsed"))
    with pytest.raises(WeightsError, match="holds more than 65536 tensors and their metadata can need"):
        read_header(path)


def test_as_many_tensors_as_allowed(tmp_path: Path) -> None:
    """With names and offsets as long as they get."""
    count = safetensors_headers.MAX_ENTRIES
    header = {f"model.layers.{i}.self_attn.q_proj.weight": entry(i, i + 1, [1, 1, 1, 1]) for i in range(count)}
    path = tmp_path / SINGLE_NAME
    path.write_bytes(pack(header, bytes(count)))
    assert len(read_header(path)) == count


def only(*files: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for file in files:
            save_file({"x": torch.ones(1)}, folder / file) if file.endswith(".safetensors") else (
                folder / file
            ).write_bytes(b"1")

    return write


def missing_shard(folder: Path) -> None:
    write_sharded(folder, TWO_SHARDS)
    (folder / "model-00002-of-00002.safetensors").unlink()


def missing_shard_without_index(folder: Path) -> None:
    missing_shard(folder)
    (folder / INDEX_NAME).unlink()


def index(content: object) -> Callable[[Path], None]:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / INDEX_NAME).write_bytes(raw) and None


def absent_tensor(folder: Path) -> None:
    names = {name: file for file, tensors in TWO_SHARDS.items() for name in tensors}
    write_sharded(folder, TWO_SHARDS, names | {"e.weight": "model-00001-of-00002.safetensors"})


def wrong_shard(folder: Path) -> None:
    names = {name: file for file, tensors in TWO_SHARDS.items() for name in tensors}
    write_sharded(folder, TWO_SHARDS, names | {"a.weight": "model-00002-of-00002.safetensors"})


def tensor_in_two_shards(folder: Path) -> None:
    write_sharded(folder, {"model-1.safetensors": ["a.weight", "b.bias"], "model-2.safetensors": ["b.bias"]})


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (only(), "No weights"),
    "adapter only": (only("adapter_model.safetensors"), "No weights"),
    "pickle only (.bin)": (only("pytorch_model.bin"), "pytorch_model.bin"),
    "pickle only (.pt)": (only("model.pt", "config.json"), "from_pretrained(folder).save_pretrained"),
    "several files, no index": (only("one.safetensors", "two.safetensors"), "Several .safetensors files"),
    "missing shard": (missing_shard, "Shard model-00002-of-00002.safetensors is missing"),
    "missing shard, no index": (missing_shard_without_index, "Shard model-00002-of-00002.safetensors is missing"),
    "index is not JSON": (index(b"{"), f"{INDEX_NAME}: not valid JSON"),
    "index without weight_map": (index({"metadata": {}}), "no usable weight_map"),
    "index with an empty weight_map": (index({"weight_map": {}}), "no usable weight_map"),
    "index leaves the folder": (index({"weight_map": {"x": "../other/model.safetensors"}}), "illegal file"),
    "index with an absolute path": (index({"weight_map": {"x": "/etc/model.safetensors"}}), "illegal file"),
    "index names a pickle": (index({"weight_map": {"x": "pytorch_model.bin"}}), "illegal file"),
    "index maps to a number": (index({"weight_map": {"x": 1}}), "illegal file"),
    "index names an absent tensor": (absent_tensor, "tensor e.weight is in model-00001-of-00002.safetensors"),
    "index names the wrong shard": (wrong_shard, "tensor a.weight is in model-00002-of-00002.safetensors"),
    "tensor in two shards": (tensor_in_two_shards, "b.bias is in model-1.safetensors and in model-2.safetensors"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_broken_folder_is_refused(tmp_path: Path, case: str) -> None:
    write, message = BAD_FOLDERS[case]
    write(tmp_path)
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)


def test_a_file_that_changes_between_check_and_load_is_refused(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / SINGLE_NAME)
    checkpoint = open_checkpoint(tmp_path)
    (tmp_path / SINGLE_NAME).write_bytes(b"short")
    with pytest.raises(WeightsError, match="changed while it was being loaded"):
        list(checkpoint.tensors())
