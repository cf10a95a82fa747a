"""Checkpoints made by `quire quantize`, and the plain weights that each format's description gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.cli.main import main

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
OPTIONS = ("--calibration-windows", "4", "--calibration-length", "256", "--num-threads", "1", "--disable-tqdm")


def quantize(to: str, out: Path, calibration: str, *more: str, model: Path | None = None) -> int:
    """The exit code of `quire quantize`; no model: the demo model."""
    words = ["quantize", *([] if model is None else [str(model)]), str(out), "--to", to, *OPTIONS]
    return main([*words, *(["--calibration", calibration] if to in ("gptq", "awq") else []), *more])


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        found |= load_file(folder / file)
    assert found.keys() == index["weight_map"].keys()
    return found


def plain_weights(folder: Path) -> dict[str, Tensor]:
    """The weights a quantized folder stands for, in float32."""
    found = tensors(folder)
    plain = {}
    for name, tensor in found.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "qweight":
            parts = {part: found[f"{module}.{part}"].numpy() for part in ("qweight", "qzeros", "scales")}
            groups = found.get(f"{module}.g_idx")
            plain[f"{module}.weight"] = _awq(**parts) if groups is None else _gptq(**parts, g_idx=groups.numpy())
        elif suffix == "weight_packed":
            scales = found[f"{module}.weight_scale"].float()
            N, K = found[f"{module}.weight_shape"].tolist()
            codes = torch.from_numpy(_codes(tensor.numpy())[:, :K].astype(np.float32)) - 8
            plain[f"{module}.weight"] = codes * scales.repeat_interleave(K // scales.shape[1], 1)
            assert codes.shape == (N, K)
        elif suffix == "weight" and f"{module}.weight_scale" in found:
            plain[name] = tensor.float() * found[f"{module}.weight_scale"].float()
        elif suffix in ("weight", "bias"):
            plain[name] = tensor.float()
    return plain


def _codes(words: np.ndarray) -> np.ndarray:
    """[rows, words] -> [rows, 8 * words]: the first code in the lowest four bits."""
    words = words.view(np.uint32)
    return np.stack([words >> 4 * place & 15 for place in range(8)], axis=2).reshape(len(words), -1)


def _gptq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray) -> Tensor:
    codes_NK, zeros_GN = _codes(np.ascontiguousarray(qweight.T)), _codes(qzeros) + 1
    difference = codes_NK.astype(np.float32) - zeros_GN.T[:, g_idx]
    return torch.from_numpy(difference * scales.astype(np.float32).T[:, g_idx])


def _awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> Tensor:
    codes_KN, zeros_GN = (np.empty((len(w), w.shape[1] * 8), np.float32) for w in (qweight, qzeros))
    for out, words in ((codes_KN, qweight), (zeros_GN, qzeros)):
        for place, column in enumerate(AWQ_ORDER):
            out[:, column::8] = words.view(np.uint32) >> 4 * place & 15
    group = len(qweight) // len(qzeros)
    difference = codes_KN - zeros_GN.repeat(group, 0)
    return torch.from_numpy(difference * scales.astype(np.float32).repeat(group, 0)).T.contiguous()


def write_plain(folder: Path, out: Path) -> Path:
    """The same model without quantization, in float32."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    save_file(plain_weights(folder), out / "model.safetensors")
    return out
