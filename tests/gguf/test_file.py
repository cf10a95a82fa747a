"""The GGUF parser: it reads good files, and refuses a bad byte without other effects."""

from __future__ import annotations

import random
import resource
import struct
import tempfile
import time
from array import array as numbers
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import WeightsError
from quire.gguf import file as gguf_file
from quire.gguf.file import GgufFile, is_gguf, open_gguf
from tests.examples import examples
from tests.gguf.raw import (
    ARRAY,
    BOOL,
    F32,
    F32_TENSOR,
    I8,
    Q4_0_TENSOR,
    Q4_K_TENSOR,
    STRING,
    U8,
    U32,
    U64,
    Raw,
    array,
    number,
    pair,
    tensor,
    text,
)


def write(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.unlink(missing_ok=True)  # file systems flush a file that is cut and written again: 20 times slower
    path.write_bytes(data)
    return path


def small() -> Raw:
    """A file with every kind of thing in it."""
    return Raw(
        pairs=[
            pair("general.architecture", STRING, text("llama")),
            pair("a.number", U32, number("I", 7)),
            pair("a.float", F32, number("f", 0.5)),
            pair("a.flag", BOOL, b"\x01"),
            pair("a.texts", ARRAY, array(STRING, text("x") + text("") + text("é"), 3)),
            pair("a.numbers", ARRAY, array(I8, b"\xff\x01", 2)),
            pair("a.nested", ARRAY, array(ARRAY, array(U8, b"\x05", 1) + array(STRING, text("y"), 1), 2)),
        ],
        tensors=[tensor("first", (4, 3), F32_TENSOR, 64), tensor("second", (32,), Q4_0_TENSOR, 0)],
        data=bytes(64 + 48),
    )


def test_reads_what_is_there(tmp_path: Path) -> None:
    found = open_gguf(write(tmp_path, small().build()))
    assert found.metadata == {
        "general.architecture": "llama",
        "a.number": 7,
        "a.float": 0.5,
        "a.flag": True,
        "a.texts": ["x", "", "é"],
        "a.numbers": numbers("b", [-1, 1]),
        "a.nested": [numbers("B", [5]), ["y"]],
    }
    assert [info.name for info in found.parts[found.path]] == ["second", "first"], "not in the order of the data"
    first = found.tensors["first"]
    assert (first.shape, first.type.name, first.end - first.begin) == ((3, 4), "F32", 48)
    assert sum(info.end - info.begin for info in found.tensors.values()) == 18 + 48


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.25, -1.0])
    weight = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    quantized = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("plain", weight)
    writer.add_tensor("packed", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(path)
    data = path.read_bytes()
    assert found.metadata["llama.block_count"] == 3
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert found.metadata["tokenizer.ggml.scores"] == numbers("f", [0.25, -1.0])
    for name, content in (("plain", weight), ("packed", quantized)):
        info = found.tensors[name]
        assert info.shape == (6, 64)
        assert data[info.begin : info.end] == content.tobytes()


def test_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    assert is_gguf(write(tmp_path, small().build(), "model.bin"))
    assert not is_gguf(write(tmp_path, b"GGU", "short.gguf"))
    assert not is_gguf(tmp_path)


U64_MAX = 2**64 - 1
HOSTILE = {
    "44 bytes with 10^8 pairs": Raw(num_pairs=10**8, pairs=[bytes(20)], alignment=1).build(),
    "2^64-1 pairs": Raw(num_pairs=U64_MAX).build(),
    "2^64-1 tensors": Raw(num_tensors=U64_MAX).build(),
    "more pairs than there are": Raw(num_pairs=9, pairs=small().pairs).build(),
    "array of 2^30 strings": Raw(pairs=[pair("k", ARRAY, array(STRING, b"", 2**30))], data=bytes(64)).build(),
    "array of 2^30 numbers": Raw(pairs=[pair("k", ARRAY, array(U8, b"", 2**30))], data=bytes(64)).build(),
    "array of 2^61 numbers": Raw(pairs=[pair("k", ARRAY, array(U64, b"", 2**61))], data=bytes(64)).build(),
    "array of 2^30 arrays": Raw(pairs=[pair("k", ARRAY, array(ARRAY, b"", 2**30))], data=bytes(64)).build(),
    "arrays nested 100 times": Raw(pairs=[pair("k", ARRAY, array(ARRAY, b"", 1) * 100)], data=bytes(64)).build(),
    "array of an unknown type": Raw(pairs=[pair("k", ARRAY, array(13, bytes(9), 1))], data=bytes(64)).build(),
    "value of an unknown type": Raw(pairs=[pair("k", 13, bytes(8))], data=bytes(64)).build(),
    "boolean of 2": Raw(pairs=[pair("k", BOOL, b"\x02")], data=bytes(64)).build(),
    "key of 2^63 bytes": Raw(pairs=[text(b"k", 2**63) + number("I", U8) + b"\0"], data=bytes(64)).build(),
    "text of 2^63 bytes": Raw(pairs=[pair("k", STRING, text("x", 2**63))], data=bytes(64)).build(),
    "text of 2^64-1 bytes": Raw(pairs=[pair("k", STRING, text("x", U64_MAX))], data=bytes(64)).build(),
    "text in an array of 2^63 bytes": Raw(pairs=[pair("k", ARRAY, array(STRING, text("x", 2**63), 1))]).build(),
    "text in an array longer than the file": Raw(pairs=[pair("k", ARRAY, array(STRING, text("x", 100), 1))]).build(),
    "key that is no UTF-8": Raw(pairs=[pair(b"\xff", U8, b"\0")], data=bytes(64)).build(),
    "text that is no UTF-8": Raw(pairs=[pair("k", ARRAY, array(STRING, text(b"\xff"), 1))], data=bytes(64)).build(),
    "key twice": Raw(pairs=[pair("k", U8, b"\0")] * 2, data=bytes(64)).build(),
    "unknown version": Raw(version=4, data=bytes(64)).build(),
    "version 1": Raw(version=1, data=bytes(64)).build(),
    "big endian": Raw(version=3 << 24, data=bytes(64)).build(),
    "other magic": Raw(magic=b"GGML", data=bytes(64)).build(),
    "empty": b"",
    "tensor without dimensions": Raw(tensors=[tensor("t", (), F32_TENSOR, 0)], data=bytes(64)).build(),
    "2^32-1 dimensions": Raw(tensors=[tensor("t", (4,), F32_TENSOR, 0, 2**32 - 1)], data=bytes(64)).build(),
    "5 dimensions": Raw(tensors=[tensor("t", (1,) * 5, F32_TENSOR, 0)], data=bytes(64)).build(),
    "size 0": Raw(tensors=[tensor("t", (4, 0), F32_TENSOR, 0)], data=bytes(64)).build(),
    "product of sizes over 2^64": Raw(
        tensors=[tensor("t", (2, 2**63 + 500), F32_TENSOR, 0)], data=bytes(1 << 12)
    ).build(),
    "product of sizes 0 modulo 2^64": Raw(tensors=[tensor("t", (2**32, 2**32), F32_TENSOR, 0)], data=bytes(64)).build(),
    "row that is no whole block": Raw(tensors=[tensor("t", (33,), Q4_0_TENSOR, 0)], data=bytes(64)).build(),
    "row that is no whole super-block": Raw(tensors=[tensor("t", (128, 2), Q4_K_TENSOR, 0)], data=bytes(144)).build(),
    "offset 2^32": Raw(tensors=[tensor("t", (4,), F32_TENSOR, 2**32)], data=bytes(64)).build(),
    "offset 2^64-32": Raw(tensors=[tensor("t", (4,), F32_TENSOR, 2**64 - 32)], data=bytes(64)).build(),
    "misaligned offset": Raw(tensors=[tensor("t", (4,), F32_TENSOR, 4)], data=bytes(64)).build(),
    "overlap": Raw(
        tensors=[tensor("t", (16,), F32_TENSOR, 0), tensor("u", (4,), F32_TENSOR, 32)], data=bytes(128)
    ).build(),
    "the same place twice": Raw(
        tensors=[tensor("t", (4,), F32_TENSOR, 0), tensor("u", (4,), F32_TENSOR, 0)], data=bytes(128)
    ).build(),
    "tensor twice": Raw(
        tensors=[tensor("t", (4,), F32_TENSOR, 0), tensor("t", (4,), F32_TENSOR, 32)], data=bytes(128)
    ).build(),
    "unknown type": Raw(tensors=[tensor("t", (4,), 99, 0)], data=bytes(64)).build(),
    "type 2^32-1": Raw(tensors=[tensor("t", (4,), 2**32 - 1, 0)], data=bytes(64)).build(),
    "removed type 4": Raw(tensors=[tensor("t", (32,), 4, 0)], data=bytes(64)).build(),
    "removed type 36": Raw(tensors=[tensor("t", (32,), 36, 0)], data=bytes(64)).build(),
    "unknown type with size 0": Raw(tensors=[tensor("t", (0,), 99, 0)], data=bytes(64)).build(),
    "removed type with size 0": Raw(tensors=[tensor("t", (0,), 5, 0)], data=bytes(64)).build(),
    "IQ4_XS": Raw(tensors=[tensor("t", (256,), 23, 0)], data=bytes(136)).build(),
    "larger than the file": Raw(tensors=[tensor("t", (17,), F32_TENSOR, 0)], data=bytes(64)).build(),
    "name of a tensor too long": Raw(tensors=[tensor("t" * 70_000, (4,), F32_TENSOR, 0)], data=bytes(64)).build(),
}
HOSTILE |= {
    f"alignment {value}": Raw(
        pairs=[pair("general.alignment", U32, number("I", value))],
        tensors=[tensor("t", (4,), F32_TENSOR, 0)],
        data=bytes(64),
    ).build()
    for value in (0, 1, 3, 48, 2**31, 2**32 - 1)
}
HOSTILE["alignment that is a text"] = Raw(
    pairs=[pair("general.alignment", STRING, text("32"))], tensors=[tensor("t", (4,), F32_TENSOR, 0)], data=bytes(64)
).build()


# Counts that are refused before the loop over their items.
COUNTS = {
    "44 bytes with 10^8 pairs": "too many key-value pairs",
    "2^64-1 pairs": "too many key-value pairs",
    "2^64-1 tensors": "too many tensors",
    "array of 2^30 strings": "too many strings in k",
    "array of 2^30 arrays": "too many arrays in k",
    "array of 2^30 numbers": "the array k",
    "2^32-1 dimensions": "number of dimensions",
}


def test_the_file_of_44_bytes_has_44_bytes() -> None:
    assert len(HOSTILE["44 bytes with 10^8 pairs"]) == 44


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, HOSTILE[name])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(WeightsError, match=COUNTS.get(name)) as caught:
        open_gguf(path)
    assert caught.value.message
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, f"took {grown} KiB for a file of {path.stat().st_size} bytes"
    assert time.process_time() - start < 5


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    whole = small().build()
    open_gguf(write(tmp_path, whole))
    for length in range(len(whole)):
        with pytest.raises(WeightsError):
            open_gguf(write(tmp_path, whole[:length]))


def test_a_header_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 150)
    with pytest.raises(WeightsError, match="header larger"):
        open_gguf(write(tmp_path, small().build()))


@pytest.mark.parametrize("limit", ["MAX_PAIRS", "MAX_TENSORS"])
def test_more_than_a_limit_that_are_there(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, limit, 1)
    with pytest.raises(WeightsError, match="declares too many"):
        open_gguf(write(tmp_path, small().build()))


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (Raw(num_pairs=60_000, data=bytes(64)), "key-value pairs"),
        (Raw(num_tensors=60_000, data=bytes(64)), "tensors"),
        (Raw(pairs=[pair("k", ARRAY, array(STRING, b"", 1 << 20))], data=bytes(64)), "strings in k"),
        (Raw(pairs=[pair("k", ARRAY, array(ARRAY, b"", 1 << 20))], data=bytes(64)), "arrays in k"),
    ],
)
def test_counts_within_limits_are_held_against_the_bytes_left(raw: Raw, what: str, tmp_path: Path) -> None:
    """Before any of the counted items is read: each would be read from the zeros that follow."""
    with pytest.raises(WeightsError, match=rf"its header needs .*{what}"):
        open_gguf(write(tmp_path, raw.build()))


def test_items_of_all_arrays_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each array alone is within the limit: small() holds 3 texts, 2 arrays and 1 text in one of these."""
    path = write(tmp_path, small().build())
    monkeypatch.setattr(gguf_file, "MAX_ITEMS", 6)
    open_gguf(path)
    for limit in (5, 4):
        monkeypatch.setattr(gguf_file, "MAX_ITEMS", limit)
        with pytest.raises(WeightsError, match="too many"):
            open_gguf(path)


def consistent(found: GgufFile) -> bool:
    """Whether everything a parsed file declares lies inside it."""
    size = found.path.stat().st_size
    infos = found.parts[found.path]
    inside = all(0 < info.begin < info.end <= size for info in infos)
    apart = all(a.end <= b.begin for a, b in pairwise(infos))
    return inside and apart


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_flipped_bytes(seed: int, tmp_path: Path) -> None:
    """A changed byte gives a consistent file or a WeightsError, and nothing else."""
    draw = random.Random(seed)
    whole = small().build()
    refused = 0
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        try:
            assert consistent(open_gguf(write(tmp_path, bytes(data))))
        except WeightsError:
            refused += 1
    assert 300 < refused < 1500


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 4, 8, 16, 24]), st.integers(0, 2**64 - 1)) | st.binary(max_size=64), max_size=12
    )
)
def test_random_words(pieces: list[tuple[int, int] | bytes]) -> None:
    """Headers made of arbitrary counts and bytes."""
    body = b"".join(struct.pack("<Q", piece[1]) if isinstance(piece, tuple) else piece for piece in pieces)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder, suppress(WeightsError):
        assert consistent(open_gguf(write(Path(folder), b"GGUF" + struct.pack("<I", 3) + body)))
    assert time.process_time() - start < 1


def split(folder: Path, count: int = 2, **changes: object) -> list[Path]:
    """A model in several files, one tensor in each."""
    paths = []
    for index in range(count):
        number_, count_, name = index, changes.get("total", count), f"t{index}"
        if index == 1:
            number_, name = changes.get("number", number_), str(changes.get("name", name))
        pairs = [
            pair("split.no", 2, number("H", number_)),
            pair("split.count", 2, number("H", count_)),
            pair("split.tensors.count", 5, number("i", changes.get("tensors", count))),
        ]
        raw = Raw(pairs=pairs, tensors=[tensor(name, (4,), F32_TENSOR, 0)], data=bytes(16))
        paths.append(write(folder, raw.build(), f"m-{index + 1:05}-of-{count:05}.gguf"))
    return paths


def test_split_files(tmp_path: Path) -> None:
    paths = split(tmp_path, 3)
    write(tmp_path, small().build(), "other-00001-of-00003.gguf")
    for path in paths:
        found = open_gguf(path)
        assert found.path == paths[0]
        assert list(found.parts) == paths
        assert sorted(found.tensors) == ["t0", "t1", "t2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": 0}, "says it is part"),
        ({"total": 3}, "one of 3 files"),
        ({"name": "t0"}, "names a tensor twice"),
        ({"tensors": 5}, "hold 2 tensors"),
    ],
)
def test_split_files_that_do_not_fit(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    paths = split(tmp_path, **changes)
    with pytest.raises(WeightsError, match=message):
        open_gguf(paths[0])


def test_a_missing_part(tmp_path: Path) -> None:
    paths = split(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(WeightsError, match="Part 2 of m is missing"):
        open_gguf(paths[0])


def test_a_name_that_promises_99999_parts(tmp_path: Path) -> None:
    path = write(tmp_path, small().build(), "m-00001-of-99999.gguf")
    with pytest.raises(WeightsError, match="Part 2 of m is missing"):
        open_gguf(path)


def test_one_part_under_another_name(tmp_path: Path) -> None:
    path = split(tmp_path)[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(WeightsError, match="one of 2 files"):
        open_gguf(path)
