"""Writes small checkpoints in each format, from its description and number by number, without Quire's code.

Dimensions: N out-features, K in-features, G groups along K.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, kw_only=True)
class Format:
    """One kind of checkpoint."""

    method: str  # awq, gptq, pack-quantized, int-quantized
    bits: int = 4
    group_size: int = -1
    has_zeros: bool = False
    has_order: bool = False
    scale_dtype: torch.dtype = torch.float16
    config: dict[str, Any] = field(default_factory=dict)  # over what `describe` says

    def describe(self) -> dict[str, Any]:
        """The object under quantization_config."""
        if self.method == "awq":
            own: dict[str, Any] = {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": self.group_size,
                "zero_point": True,
                "version": "gemm",
            }
        elif self.method == "gptq":
            own = {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group_size,
                "sym": not self.has_zeros,
                "desc_act": self.has_order,
                "checkpoint_format": "gptq",
            }
        else:
            weights = {"num_bits": self.bits, "type": "int", "symmetric": not self.has_zeros, "strategy": "channel"}
            if self.group_size > 0:
                weights |= {"strategy": "group", "group_size": self.group_size}
            if self.has_order:
                weights["actorder"] = "group"
            group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
            if self.method == "int-quantized":
                group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
            own = {
                "quant_method": "compressed-tensors",
                "format": self.method,
                "ignore": ["lm_head"],
                "config_groups": {"group_0": group},
            }
        return own | self.config


@dataclass(frozen=True)
class Numbers:
    """weight[n, k] = scale * (code - zero), with scale and zero of the k-th in-feature's group."""

    codes_NK: np.ndarray
    scales_NG: Tensor
    zeros_NG: np.ndarray
    group_K: np.ndarray

    def weight(self) -> Tensor:
        """In float32."""
        codes_NK, zeros_NK = torch.from_numpy(self.codes_NK), torch.from_numpy(self.zeros_NG[:, self.group_K])
        return (codes_NK - zeros_NK).float() * self.scales_NG.float()[:, self.group_K]


def draw(rng: np.random.Generator, N: int, K: int, form: Format, spread: float = 1.0) -> Numbers:
    """Random numbers whose weights have about the deviation spread / sqrt(K)."""
    size = form.group_size if form.group_size > 0 else K
    num_groups, largest, middle = -(-K // size), 2**form.bits - 1, 2 ** (form.bits - 1)
    codes_NK = rng.integers(0, largest + 1, (N, K))
    scales_NG = torch.from_numpy(rng.uniform(0.5, 1.5, (N, num_groups)) * spread * 3.5 / largest / K**0.5)
    zeros_NG = np.full((N, num_groups), middle)
    if form.has_zeros:
        zeros_NG = rng.integers(middle - middle // 4, middle + middle // 4 + 1, (N, num_groups))
        zeros_NG[0, 0], zeros_NG[N // 2, -1] = 0, largest  # the ends: the first version of GPTQ stores 0 as -1
    group_K = np.arange(K) // size
    return Numbers(
        codes_NK, scales_NG.to(form.scale_dtype), zeros_NG, rng.permutation(group_K) if form.has_order else group_K
    )


def nearest(weight_NK: Tensor, form: Format) -> Numbers:
    """Each group's range in even steps, by rounding."""
    N, K = weight_NK.shape
    size = form.group_size if form.group_size > 0 else K
    group_K = np.arange(K) // size
    if form.has_order:
        group_K = np.random.default_rng(7).permutation(group_K)
    num_groups, largest, middle = -(-K // size), 2**form.bits - 1, 2 ** (form.bits - 1)
    codes_NK, zeros_NG = np.zeros((N, K), dtype=np.int64), np.full((N, num_groups), middle)
    scales_NG = torch.zeros((N, num_groups), dtype=form.scale_dtype)
    for group in range(num_groups):
        columns = group_K == group
        part = weight_NK.float().numpy()[:, columns]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        steps = (high - low) / largest if form.has_zeros else np.maximum(-low, high) / (middle - 1)
        scales_NG[:, group] = torch.from_numpy(steps)
        scale_N = np.maximum(scales_NG[:, group].float().numpy(), 1e-8)
        if form.has_zeros:
            zeros_NG[:, group] = np.clip(np.round(-low / scale_N), 0, largest)
        codes_NK[:, columns] = np.clip(np.round(part / scale_N[:, None]) + zeros_NG[:, group, None], 0, largest)
    return Numbers(codes_NK, scales_NG, zeros_NG, group_K)


def write_quantized(source: Path, folder: Path, form: Format) -> None:
    """A checkpoint of another, its linear layers rounded, beside its tokenizer."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("proj.weight"):
            parts = tensors_of(nearest(tensor, form), form)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_tensors(folder, tensors)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": form.describe()}
    (folder / "config.json").write_text(json.dumps(config))


def tensors_of(numbers: Numbers, form: Format) -> dict[str, Tensor]:
    """The tensors of one linear layer."""
    codes_NK, zeros_NG, bits = numbers.codes_NK, numbers.zeros_NG, form.bits
    group_K = torch.from_numpy(numbers.group_K).int()
    if form.method == "awq":
        return {
            "qweight": pack(codes_NK.T, bits, AWQ_ORDER),
            "qzeros": pack(zeros_NG.T, bits, AWQ_ORDER),
            "scales": numbers.scales_NG.T.contiguous(),
        }
    if form.method == "gptq":
        less = 0 if form.describe()["checkpoint_format"] == "gptq_v2" else 1
        return {
            "qweight": pack(codes_NK, bits).T.contiguous(),
            "qzeros": pack((zeros_NG.T - less) % 2**bits, bits),
            "scales": numbers.scales_NG.T.contiguous(),
            "g_idx": group_K,
        }
    if form.method == "int-quantized":
        return {
            "weight": torch.from_numpy((codes_NK - 128).astype(np.int8)),
            "weight_scale": numbers.scales_NG,
        }
    tensors = {
        "weight_packed": pack(codes_NK, bits),
        "weight_scale": numbers.scales_NG,
        "weight_shape": torch.tensor(codes_NK.shape),
    }
    if form.has_zeros:
        tensors["weight_zero_point"] = pack(zeros_NG.T, bits).T.contiguous()
    if form.has_order:
        tensors["weight_g_idx"] = group_K
    return tensors


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, columns] -> int32 [rows, words]; code i of a word, the lowest first, is column order[i] of its columns."""
    per_word = 32 // bits
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // per_word)), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place in range(per_word):
            column = word * per_word + (order[place] if order else place)
            if column < columns:
                words[:, word] |= codes[:, column].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


@dataclass(frozen=True)
class Written:
    """A checkpoint folder, and the same model in floating point."""

    folder: Path
    tensors: dict[str, Tensor]
    model: Any  # of transformers, in float32, with the weights the codes stand for

    def write_changed(self, folder: Path, changes: Mapping[str, Tensor | None]) -> None:
        """A copy with other tensors; None: without one."""
        (folder / "config.json").write_bytes((self.folder / "config.json").read_bytes())
        save_tensors(folder, {name: t for name, t in (self.tensors | dict(changes)).items() if t is not None})


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def write(folder: Path, model_config: Any, form: Format, plain: tuple[str, ...] = ()) -> Written:
    """A random model whose linear layers, but those with a name that ends in one of `plain`, are in the format."""
    rng = np.random.default_rng(5)

    def make(N: int, K: int) -> tuple[Tensor, dict[str, Tensor]]:
        numbers = draw(rng, N, K, form)
        return numbers.weight(), tensors_of(numbers, form)

    return write_model(folder, model_config, form.describe(), make, plain)


def write_model(
    folder: Path,
    model_config: Any,  # of transformers
    description: dict[str, Any],
    make: Callable[[int, int], tuple[Tensor, dict[str, Tensor]]],
    plain: tuple[str, ...] = (),
) -> Written:
    """A random model whose linear layers, but those with a name that ends in one of `plain`, are quantized.

    Args:
        description: the object under quantization_config.
        make: (N, K) -> a layer's weight [N, K] in float32, and the tensors that stand for it.
    """
    import transformers  # takes seconds, and users of the other functions do without it

    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(model_config, attn_implementation="eager").eval()
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear):
                continue
            if name.endswith(("lm_head", *plain)):
                module.weight.normal_(0.0, module.in_features**-0.5)
                continue
            weight_NK, parts = make(module.out_features, module.in_features)
            module.weight.copy_(weight_NK)
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                tensors |= _write_experts(name, module, make)
            elif isinstance(weight := getattr(module, "weight", None), Tensor) and name.endswith("mlp.gate"):
                weight.normal_(0.0, weight.shape[1] ** -0.5)
        model.get_input_embeddings().weight.normal_()
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
    quantized = {name.rpartition(".")[0] + ".weight" for name in tensors}
    for name, parameter in model.named_parameters():
        if name not in quantized and ".experts." not in name:
            tensors[name] = parameter.detach().clone()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = buffer.clone()
    if model_config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    folder.mkdir(exist_ok=True)
    save_tensors(folder, tensors)
    config = model_config.to_dict() | {
        "architectures": [type(model).__name__],
        "torch_dtype": "float32",
        "quantization_config": description,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return Written(folder, tensors, model)


def _write_experts(
    name: str, module: Any, make: Callable[[int, int], tuple[Tensor, dict[str, Tensor]]]
) -> dict[str, Tensor]:
    """Fill the experts of a layer, and give their tensors as checkpoints hold them: per expert."""
    tensors = {}
    for expert, (gate_up, down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
        gate, up = gate_up.chunk(2)
        for part, weight_NK in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            values, parts = make(*weight_NK.shape)
            weight_NK.copy_(values)
            tensors |= {f"{name}.{expert}.{part}.{suffix}": tensor for suffix, tensor in parts.items()}
    return tensors
