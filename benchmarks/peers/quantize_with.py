"""Checkpoints that other quantizers than Quire's write on the CPU, each in its own environment.

    python benchmarks/peers/quantize_with.py gptqmodel FORMAT MODEL OUT --tokens TOKENS.json
    python benchmarks/peers/quantize_with.py llmcompressor FORMAT MODEL OUT --tokens TOKENS.json
    python benchmarks/peers/quantize_with.py llama.cpp TYPE MODEL.gguf OUT.gguf [--tensors PATTERN=TYPE ...]

FORMAT is a key of GPTQMODEL or LLMCOMPRESSOR below, or one of PRESETS. TOKENS.json is a list of lists of token ids for
the calibration, as `checkpoints.py prompts` writes it. TYPE is a type of llama.cpp, for example Q4_K_M; F32 writes the
values of the weights of a quantized file as floats. `checkpoints.py` compares the results of engines that read these
checkpoints.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

GPTQMODEL: dict[str, dict[str, Any]] = {
    "gptq": {},
    "gptq-zeros": {"sym": False},
    "gptq-v2": {"sym": False, "format": "gptq_v2"},
    "gptq-order": {"desc_act": True, "act_group_aware": False},
    "gptq-8": {"bits": 8},
    "awq": {"method": "awq", "format": "gemm"},
}
LLMCOMPRESSOR: dict[str, dict[str, Any]] = {
    "w4a16": {"num_bits": 4},
    "w4a16-zeros": {"num_bits": 4, "symmetric": False},
    "w8a16": {"num_bits": 8},
}
PRESETS = ("W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK")  # schemes of compressed-tensors


def with_gptqmodel(name: str, group_size: int, model: str, out: str, token_ids: list[list[int]]) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(**{"bits": 4, "group_size": group_size} | GPTQMODEL[name], offload_to_disk=False)
    quantized = GPTQModel.load(model, config, device="cpu")
    quantized.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in token_ids], batch_size=1)
    quantized.save(out)


def with_llmcompressor(name: str, group_size: int, model: str, out: str, token_ids: list[list[int]]) -> None:
    """Write a checkpoint with llmcompressor. `group_size` is not used for PRESETS, which have no groups."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoModelForCausalLM

    if name in PRESETS:
        kind = GPTQModifier if name == "W8A8" else QuantizationModifier
        modifier = kind(targets="Linear", ignore=["lm_head"], scheme=name)
    else:
        weights = QuantizationArgs(strategy="group", group_size=group_size, **LLMCOMPRESSOR[name])
        groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
        modifier = GPTQModifier(ignore=["lm_head"], config_groups=groups)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in token_ids]
    oneshot(
        model=loaded,
        dataset=Dataset.from_list(rows),
        recipe=modifier,
        num_calibration_samples=len(rows),
        max_seq_length=max(len(ids) for ids in token_ids),
    )
    loaded.save_pretrained(out, save_compressed=True)


def with_llamacpp(name: str, model: str, out: str, tensors: list[str]) -> None:
    """Write a GGUF file. `tensors` has PATTERN=TYPE: tensors whose names match get this type, in ggml's spelling
    (Q8_0).
    """
    import gguf
    import llama_cpp

    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{'ALL' if name == 'F32' else 'MOSTLY'}_{name}")
    params.allow_requantize = name == "F32"  # F32 loses nothing
    pairs = [each.split("=") for each in tensors]
    overrides = (llama_cpp.llama_model_tensor_override * (len(pairs) + 1))()  # the last, empty override marks the end
    for override, (pattern, kind) in zip(overrides, pairs, strict=False):
        override.pattern, override.type = pattern.encode(), int(gguf.GGMLQuantizationType[kind])
    if pairs:
        params.tt_overrides = ctypes.cast(overrides, type(params.tt_overrides))
    code = llama_cpp.llama_model_quantize(model.encode(), out.encode(), ctypes.byref(params))
    if code != 0:
        raise SystemExit(f"llama.cpp's quantizer returned {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("maker", choices=("gptqmodel", "llmcompressor", "llama.cpp"))
    parser.add_argument("format", metavar="FORMAT")
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--tensors", nargs="*", default=[], metavar="PATTERN=TYPE")
    args = parser.parse_args()
    if args.maker == "llama.cpp":
        with_llamacpp(args.format, args.model, args.out, args.tensors)
        return
    make = with_gptqmodel if args.maker == "gptqmodel" else with_llmcompressor
    make(args.format, args.group_size, args.model, args.out, json.loads(args.tokens.read_text()))


if __name__ == "__main__":
    main()
