"""The peak of resident memory while loading, in a process of its own: weights are never held twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.kernels import cpu
from quire.model_config import load_model_config
from quire.models.registry import build_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LIMIT = 1.3  # of the weights

SCRIPT = """
import sys, threading, torch
from pathlib import Path
from quire.loader.load import load_model
from quire.model_config import load_model_config

def resident(key):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(key)]
    return 1024 * int(line.split()[1])

config = load_model_config(Path(sys.argv[1]))
torch.zeros(1) + 1
before = resident("VmRSS")
model = load_model(config, torch.bfloat16, packed_weights_cache=sys.argv[2] == "cache")
print((resident("VmHWM") - before) / model.weight_bytes(), model.mapped_bytes)
for thread in threading.enumerate():
    if thread.name == "packed weights":
        thread.join()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    expected = build_model(load_model_config(folder), torch.bfloat16).expected_weights()
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in expected.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def peak(folder: Path, how: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """Over what the weights take, and the bytes that are mapped."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(cache))
    command = [sys.executable, "-c", SCRIPT, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    share, mapped_bytes = done.stdout.split()
    return float(share), int(mapped_bytes)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not cpu.available(), reason="reads /proc; packing copies")
def test_weights_are_never_held_twice(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak(folder, "pack", tmp_path, monkeypatch)[0] < LIMIT
    assert peak(folder, "cache", tmp_path, monkeypatch)[0] < LIMIT, "while keeping"
    share, mapped_bytes = peak(folder, "cache", tmp_path, monkeypatch)
    assert mapped_bytes > 0
    assert share < LIMIT, "while mapping"
