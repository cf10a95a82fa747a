"""The bytes of a checkpoint that a rank reads: the pages that the system reads for it, and the requests to an object
store.

Ranks of a node find in memory what another one has read. So a node reads each byte once if ranks read their shares.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.config import EngineConfig
from quire.kernels import cpu
from quire.layers.weight_slot import Extent
from quire.loader.hub import resolve_model
from quire.loader.safetensors import open_checkpoint
from quire.loader.safetensors_writer import write_tensors
from quire.model_config import load_model_config
from quire.models.decoder import Decoder
from quire.models.form import ModelForm, Sharing
from quire.models.registry import build_model
from quire.planning.cut_stages import part_of_rank
from tests.gguf.writing import write_gguf
from tests.loader.local_store import Store
from tests.loading import load_model
from tests.quantization import checkpoints, fp8_checkpoints
from tests.quantization.checkpoints import Format
from tests.quantization.fp8_checkpoints import Fp8Form

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

MOST = 1.15  # of its share
MOST_TRIES = 3  # the system may read more than it is asked for, when memory is short; it never reads less
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
FUSED = DENSE | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "head_dim": 64, "pad_token_id": 0}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}
SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 1024, "num_experts": 4}
TP: dict[str, Any] = {"tensor_parallel_size": 2}
MODELS = {
    "dense": (DENSE, TP),
    "three ranks": (DENSE, {"tensor_parallel_size": 3}),
    "stages": (DENSE, {"pipeline_parallel_size": 2}),
    "fused": (FUSED, TP),
    "experts": (EXPERTS, TP),
    "whole experts": (EXPERTS, TP | {"enable_expert_parallel": True}),
    "one tensor of all experts": (EXPERTS, TP),
    "whole experts in one tensor": (EXPERTS, TP | {"enable_expert_parallel": True}),
}


def write(
    folder: Path, config: dict[str, Any], *, is_stacked: bool, numbers: Callable[..., torch.Tensor] = torch.rand
) -> Path:
    """A checkpoint -> its file. `numbers` makes a tensor by its shape."""
    (folder / "config.json").write_text(json.dumps(config))
    shapes = build_model(load_model_config(folder), ModelForm(torch.bfloat16)).expected_weights()
    if is_stacked:
        shapes = {name: shape for name, shape in shapes.items() if ".experts." not in name}
        for prefix in (f"model.layers.{layer}.mlp.experts." for layer in range(config["num_hidden_layers"])):
            E, I, D = config["num_experts"], config["moe_intermediate_size"], config["hidden_size"]  # noqa: E741
            shapes |= {f"{prefix}gate_up_proj": (E, 2 * I, D), f"{prefix}down_proj": (E, D, I)}
    torch.manual_seed(0)
    weights = {name: numbers(shape, dtype=torch.bfloat16) for name, shape in sorted(shapes.items())}
    write_tensors(folder / "model.safetensors", weights)
    return folder / "model.safetensors"


def load_rank(folder: Path, config: EngineConfig, rank: int) -> Decoder:
    model = load_model(part_of_rank(load_model_config(folder), config, rank), torch.bfloat16)
    assert isinstance(model, Decoder)
    return model


def drop(path: Path) -> None:
    """The pages of a file from memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def num_bytes_in_memory(path: Path) -> int:
    """Of a file, whoever has read them."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
        view = np.frombuffer(mapped, dtype=np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        found = libc.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped)), pages.ctypes.data_as(ctypes.c_void_p)
        )
        assert found == 0, os.strerror(ctypes.get_errno())
        del view
    return mmap.PAGESIZE * int((pages & 1).sum())


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no page can be dropped")
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_its_share_of_the_file(name: str, tmp_path: Path) -> None:
    form, sizes = MODELS[name]
    # Up to 55 million random numbers would take longer than all reads, which do not depend on them.
    path = write(tmp_path, form, is_stacked="one tensor" in name, numbers=torch.zeros)
    config = EngineConfig.from_kwargs(**sizes)
    total = 0
    for rank in range(config.num_ranks):
        for _ in range(MOST_TRIES):
            drop(path)
            if num_bytes_in_memory(path):
                pytest.skip("the files of this folder are always in memory")
            model = load_rank(tmp_path, config, rank)
            read, share = num_bytes_in_memory(path), model.weight_bytes()
            print(f"{name}, rank {rank}: {read / share:.3f} of its share")
            assert share <= 1.01 * read, "it was not read from the file"
            if read <= MOST * share:
                break
        assert read <= MOST * share
        total += read
    assert total <= MOST * path.stat().st_size


@dataclass(frozen=True)
class Waiting:
    """A group whose other ranks have not come yet."""

    rank: int
    size: int

    def gather(self, part: torch.Tensor, widths: Any) -> torch.Tensor:
        raise AssertionError("a rank waits for others while it loads")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no page can be dropped")
@pytest.mark.parametrize("name", ["dense", "fused"])
def test_a_rank_reads_its_share_for_modelling_code(name: str, tmp_path: Path) -> None:
    """transformers places the tensors, and only the rows of the rank are read."""
    form, sizes = MODELS[name]
    path = write(tmp_path, form, is_stacked=False, numbers=torch.ones)  # with zeros no query depends on its position
    config = EngineConfig.from_kwargs(**sizes, model_impl="transformers")
    for rank in range(2):
        for _ in range(MOST_TRIES):
            drop(path)
            if num_bytes_in_memory(path):
                pytest.skip("the files of this folder are always in memory")
            part = part_of_rank(load_model_config(tmp_path), config, rank)
            sharing = Sharing(group=Waiting(rank, 2))  # type: ignore[arg-type]
            load_model(part, torch.bfloat16, model_impl="transformers", sharing=sharing)
            read, share = num_bytes_in_memory(path), path.stat().st_size / 2
            print(f"{name}, rank {rank}: {read / share:.3f} of its share")
            if read <= MOST * share:
                break
        assert 0.9 * share < read <= MOST * share


STORED: dict[str, Format | Fp8Form] = {
    "AWQ": Format(method="awq", group_size=128, has_zeros=True),
    "GPTQ with act-order": Format(method="gptq", group_size=128, has_zeros=True, has_order=True),
    "int8 of whole rows": Format(method="int-quantized", bits=8),
    "pack-quantized": Format(method="pack-quantized", group_size=128, has_zeros=True),
    "FP8 blocks": Fp8Form(scales="block"),
}
ALIKE = ("GPTQ with act-order", "int8 of whole rows", "pack-quantized")  # in slow tests, beside AWQ and FP8 blocks


def write_stored(folder: Path, name: str) -> Path:
    """A checkpoint in a stored format, with the sizes of DENSE -> its file."""
    import transformers

    sizes = DENSE | {"num_hidden_layers": 1, "intermediate_size": 2048}
    config = transformers.Qwen3Config(**{key: value for key, value in sizes.items() if key != "architectures"})
    if name == "Q4_K":
        (folder / "plain").mkdir()
        write(folder / "plain", sizes, is_stacked=False)
        write_gguf(folder / "m.gguf", folder / "plain", "Q4_K")
        return folder / "m.gguf"
    form = STORED[name]
    (fp8_checkpoints if isinstance(form, Fp8Form) else checkpoints).write(folder, config, form)  # type: ignore[arg-type]
    return folder / "model.safetensors"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no page can be dropped")
@pytest.mark.parametrize("name", ["FP8 blocks", *(pytest.param(name, marks=pytest.mark.slow) for name in ALIKE[1:])])
def test_a_rank_reads_its_share_of_stored_rows(name: str, tmp_path: Path) -> None:
    """A row of outputs is a row of the file. In AWQ and GPTQ it is a column: see the next test."""
    path, config = write_stored(tmp_path, name), EngineConfig.from_kwargs(**TP)
    share = path.stat().st_size / 2
    for rank in range(2):
        for _ in range(MOST_TRIES):
            drop(path)
            if num_bytes_in_memory(path):
                pytest.skip("the files of this folder are always in memory")
            load_rank(tmp_path, config, rank)
            read = num_bytes_in_memory(path)
            print(f"{name}, rank {rank}: {read / share:.3f} of its share")
            if read <= MOST * share:
                break
        assert 0.9 * share < read <= MOST * share


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no page can be dropped")
@pytest.mark.parametrize(("form", "N", "num_ranks", "most"), [
    ("GPTQ", 16384, 2, MOST), ("GPTQ", 16384, 4, 1.3), ("AWQ", 65536, 2, 1.3), ("AWQ", 65536, 4, 1.55),
    ("AWQ", 16384, 2, 2.05),
])  # fmt: skip
def test_a_rank_reads_its_columns(form: str, N: int, num_ranks: int, most: float, tmp_path: Path) -> None:
    """A rank reads the pages with its part of each row: one page of 4 KiB more than the part has.

    In the last case parts have 4 KiB, and a rank reads the whole tensor.
    """
    K = 256  # a word has 8 weights: in GPTQ of a column, in AWQ of a row
    num_rows, num_columns = (K // 8, N) if form == "GPTQ" else (K, N // 8)
    words = torch.arange(num_rows * num_columns, dtype=torch.int32).view(num_rows, num_columns)
    write_tensors(tmp_path / "model.safetensors", {"before": torch.zeros(3), "w": words, "z": torch.zeros(5)})
    path, per_rank = tmp_path / "model.safetensors", num_columns // num_ranks
    share, checkpoint = words.nbytes / num_ranks, open_checkpoint(tmp_path)
    for rank in range(num_ranks):
        columns = range(rank * per_rank, (rank + 1) * per_rank)
        extents = {"w": Extent(num_rows, (range(num_rows),), num_columns, (columns,))}
        for _ in range(MOST_TRIES):
            drop(path)
            if num_bytes_in_memory(path):
                pytest.skip("the files of this folder are always in memory")
            own = slice(columns.start, columns.stop)
            found = {
                name: tensor[:, own].clone() for name, tensor in checkpoint.tensors(None, extents.get) if name == "w"
            }
            read = num_bytes_in_memory(path)
            print(f"{form}, rank {rank} of {num_ranks}: {read / share:.3f} of its share")
            assert read >= share
            if read <= most * share:
                break
        assert torch.equal(found["w"], words[:, own])
        assert read <= most * share


@pytest.mark.parametrize("name", ["AWQ", "GPTQ with act-order"])
def test_the_columns_of_a_rank(name: str, tmp_path: Path) -> None:
    """Ranks name the columns that they read: together all, and each column once."""
    write_stored(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    models = [load_rank(tmp_path, EngineConfig.from_kwargs(**TP), rank) for rank in range(2)]
    num_cut = 0
    for tensor_name, tensor in checkpoint.headers():
        extents = [model.extent(tensor_name) for model in models]
        if tensor_name.endswith((".qweight", ".qzeros", ".scales")):
            found = [column for extent in extents if extent is not None for each in extent.columns for column in each]
            assert found == list(range(tensor.shape[1])), tensor_name
            num_cut += 1
    assert num_cut >= 21


def read_bytes() -> int:
    """The bytes that this process has had read from disks so far."""
    words = (line.split() for line in Path("/proc/self/io").read_text().splitlines())
    return next(int(number) for name, number in words if name == "read_bytes:")


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count what a process reads")
@pytest.mark.parametrize(
    "name",
    [
        *("dense", "whole experts in one tensor", "AWQ", "FP8 blocks", "Q4_K"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("experts", *ALIKE)),
    ],
)
def test_ranks_of_a_node_read_each_byte_once(name: str, tmp_path: Path) -> None:
    """Three of them that load at the same time. No rank drops pages that another one needs later."""
    form, sizes = MODELS.get(name, (DENSE, TP))
    if name in MODELS:
        path = write(tmp_path, form, is_stacked="one tensor" in name, numbers=torch.zeros)
    else:
        path = write_stored(tmp_path, name)
    config = EngineConfig.from_kwargs(**sizes | {"tensor_parallel_size": 3})
    folder = path if path.suffix == ".gguf" else tmp_path
    for _ in range(MOST_TRIES):
        drop(path)
        if num_bytes_in_memory(path):
            pytest.skip("the files of this folder are always in memory")
        before = read_bytes()
        with ThreadPoolExecutor(3) as ranks:
            list(ranks.map(partial(load_rank, folder, config), range(3)))
        read, size = read_bytes() - before, path.stat().st_size
        print(f"{name}: {read / size:.3f} of the file")
        assert read > 0.9 * size, "it was not read from the file"
        if read <= MOST * size:
            break
    assert read <= MOST * size


@pytest.mark.parametrize("name", ["dense", "fused", "one tensor of all experts", "whole experts in one tensor"])
def test_a_rank_asks_an_object_store_for_its_share(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, sizes = MODELS[name]
    path, own = write(tmp_path, form | SMALL, is_stacked="one tensor" in name), name.replace(" ", "-")
    config = EngineConfig.from_kwargs(**sizes)
    with Store({f"{own}/{each.name}": each.read_bytes() for each in tmp_path.iterdir()}) as store:
        for variable, value in store.environment(tmp_path / "cache").items():
            monkeypatch.setenv(variable, value)
        folder = resolve_model(f"s3://models/{own}")
        for rank in range(config.num_ranks):
            store.reads.clear()
            found = load_rank(folder, config, rank)
            places = [text for key, text in store.reads if key == f"{own}/{path.name}" and text is not None]
            ranges = [text.removeprefix("bytes=").split("-") for text in places]
            read = sum(int(end) + 1 - int(begin) for begin, end in ranges)
            assert 0 < read <= MOST * found.weight_bytes()
            check_equal(found, load_rank(tmp_path, config, rank))


def check_equal(found: Decoder, expected: Decoder) -> None:
    """What was not read is used nowhere."""
    ours, theirs = list(tensors_in(found.held())), list(tensors_in(expected.held()))
    assert len(ours) == len(theirs) > 5
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Of packed weights too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
