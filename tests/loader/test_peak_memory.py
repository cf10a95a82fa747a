"""The peak of resident memory while loading, in a process of its own: weights are never held twice.

Resident means VmHWM: anonymous memory and the pages of mapped files, the checkpoint's too. The memory that the
interpreter and its libraries take before is subtracted.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quire.kernels import cpu
from quire.loader.hub import resolve_model
from quire.model_config import load_model_config
from quire.models.form import ModelForm
from quire.models.registry import build_model
from tests.gguf.writing import add_config
from tests.loader.local_store import Store

# As in small models the embeddings, which are the output projection as well, are a large part.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
EXPERTS_CONFIG = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
}
EXPERTS_LIMIT = 1.3  # less is around them
LIMIT = 1.4  # of the weights; the interpreter and its libraries take up to 0.3 of these small ones, held twice is 2

SCRIPT = """
import sys, threading, torch
from pathlib import Path
from tests.loading import load_model
from quire.model_config import load_model_config
if sys.argv[3] == "transformers":
    from transformers import Qwen3ForCausalLM

def resident(key):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(key)]
    return 1024 * int(line.split()[1])

config = load_model_config(Path(sys.argv[1]))
torch.zeros(1) + 1
before = resident("VmRSS")
model = load_model(
    config,
    torch.bfloat16,
    packed_weights_cache=sys.argv[2] == "cache",
    model_impl=sys.argv[3],
    quantization=sys.argv[4] or None,
)
print((resident("VmHWM") - before) / model.weight_bytes(), model.mapped_bytes, resident("RssAnon"), resident("RssFile"))
for thread in threading.enumerate():
    if thread.name == "packed weights":
        thread.join()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or not cpu.available(), reason="reads /proc; packing copies"),
]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return build_model(load_model_config(folder), ModelForm(torch.bfloat16)).expected_weights()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, tuple[int, ...]]) -> Path:
    return write_zeros(tmp_path_factory.mktemp("model"), CONFIG, shapes)


@pytest.fixture(params=["each expert", "one tensor"])
def experts_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """1.2 GB of experts in one of two forms."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS_CONFIG))
    shapes = build_model(load_model_config(tmp_path), ModelForm(torch.bfloat16)).expected_weights()
    if request.param == "one tensor":
        shapes = {name: shape for name, shape in shapes.items() if ".experts." not in name}
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts."
            shapes |= {f"{prefix}gate_up_proj": (64, 1536, 1024), f"{prefix}down_proj": (64, 1024, 768)}
    return write_zeros(tmp_path, EXPERTS_CONFIG, shapes)


def write_zeros(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A checkpoint of zeros, which take no room on the disk, but for what makes queries and keys of a few tokens."""
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        start = file.tell()
        file.truncate(start + end)
        for name, shape in shapes.items():
            if "norm" in name or "q_proj" in name or "k_proj" in name or "embed" in name:
                file.seek(start + header[name]["data_offsets"][0])
                file.write(b"\0\x3c" * min(math.prod(shape), 1 << 22))  # 2^-7
    return folder


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Zeros as well, in Q4_K."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    add_config(writer, CONFIG, splits_heads=True)
    kind = gguf.GGMLQuantizationType.Q4_K
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, CONFIG["num_hidden_layers"])
    for hf_name, shape in shapes.items():
        name = names.get_name(hf_name, try_suffixes=(".weight",))
        if len(shape) == 1:
            writer.add_tensor(name, np.zeros(shape, np.float32))
        else:
            row_bytes = shape[1] // block_size * block_bytes
            writer.add_tensor(name, np.zeros((shape[0], row_bytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def peak(model: Path, how: str = "pack", impl: str = "auto", quantization: str = "") -> tuple[float, int]:
    """Over the memory of the weights, and the bytes that are mapped."""
    command = [sys.executable, "-c", SCRIPT, str(model), how, impl, quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    share, mapped_bytes, anonymous_bytes, file_bytes = done.stdout.split()
    print(f"{impl} {quantization}: {share} of the weights; then {anonymous_bytes} anonymous, {file_bytes} of files")
    return float(share), int(mapped_bytes)


@pytest.mark.parametrize("quantization", ["", "int8", "int4", "fp8"])
def test_weights_are_never_held_twice(folder: Path, quantization: str) -> None:
    assert peak(folder, quantization=quantization)[0] < LIMIT


@pytest.mark.parametrize("quantization", ["", "int4"])
def test_nor_those_of_experts(experts_folder: Path, quantization: str) -> None:
    assert peak(experts_folder, quantization=quantization)[0] < EXPERTS_LIMIT


def test_nor_those_of_gguf_files(gguf_file: Path) -> None:
    assert peak(gguf_file)[0] < LIMIT


def test_nor_those_of_an_object_store(
    shapes: dict[str, tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the packed weights are one whole tensor and what is read ahead. Checkpoints are sorted by name."""
    folder = write_zeros(tmp_path, CONFIG, dict(sorted(shapes.items())))
    with Store({f"model/{path.name}": b"" for path in folder.iterdir()}) as store:
        store.objects["model/config.json"] = (folder / "config.json").read_bytes()
        with (folder / "model.safetensors").open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as weights:
            store.objects["model/model.safetensors"] = weights
            store.etags["model/model.safetensors"] = "a-version"
            for name, value in store.environment(tmp_path / "cache").items():
                monkeypatch.setenv(name, value)
            assert peak(resolve_model("s3://models/model"))[0] < LIMIT
            store.objects.clear()


def test_nor_by_transformers_code(folder: Path) -> None:
    assert peak(folder, impl="transformers")[0] < LIMIT


def test_nor_those_that_are_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    assert peak(folder, "cache")[0] < LIMIT, "while keeping"
    share, mapped_bytes = peak(folder, "cache")
    assert mapped_bytes > 0
    assert share < LIMIT, "while mapping"
