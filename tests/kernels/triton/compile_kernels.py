"""Compiles every GPU kernel for sm_80 and sm_90 with the tiles it is launched with; no GPU is needed.

Prints a JSON object: per kernel and architecture, bytes of stack (spilled registers), registers, bytes of shared
memory, and whether it multiplies with wgmma. Runs in a process of its own: the tests beside it interpret the kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.formats.weight_format import GGUF, MXFP4, GroupedFormat
from quire.kernels.triton import (
    activation,
    attention,
    dense,
    experts,
    fp8,
    grouped,
    latent,
    lora,
    norm,
    parts,
    rope_cache,
    sampling,
)

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def signature(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> dict[str, str]:
    """Pointers to bfloat16 and 32-bit integers, unless `types` says otherwise."""
    found = {}
    for name in kernel.arg_names:
        if name in constants:
            found[name] = "constexpr"
        else:
            found[name] = types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
    return found


def attention_case(
    num_tokens: int,
    num_seqs: int,
    group: int,
    head_dim: int,
    codes: str = "none",
    sm: int = 80,
    is_deterministic: bool = False,
    window: int = 0,
    has_soft_cap: bool = False,
    chunk: int = 0,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    num_owners: int = 1,
) -> dict[str, Any]:
    """The kernel with the tiles of such a batch. With several owners, it sums ranges of 256 keys."""
    has_codes, is_float32 = codes != "none", dtype == torch.float32
    is_wgmma = sm == 90 and not is_float32
    if is_deterministic:
        shape = attention.choose_fixed_shape(num_tokens, num_seqs, group, 8, head_dim, 8192, is_wgmma, is_float32)
    else:
        shape = attention.choose_shape(num_tokens, num_seqs, group, 8, head_dim, has_codes, is_wgmma, is_float32)
    if num_owners > 1:
        shape = replace(shape, segments=1, range_len=256)
    constants = {
        "GROUP": group,
        "E": head_dim,
        "P": 16 if num_owners == 1 else 256,
        "BLOCK_E": triton.next_power_of_2(head_dim),
        "BLOCK_M": shape.block_m,
        "BLOCK_Q": shape.block_m // group,
        "TILE": shape.tile,
        "WINDOW": window,
        "CHUNK": chunk,
        "HAS_SOFT_CAP": has_soft_cap,
        "SEGMENTS": shape.segments,
        "RANGE": shape.range_len,
        "CODES": codes,
        "OWNERS": num_owners,
        "OWNER": num_owners - 1,
        "UPCAST": False,
    }
    types = dict.fromkeys(("q_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"), POINTERS[dtype])
    types |= dict.fromkeys(("block_tables_ptr", "seq_lens_ptr", "cu_seqlens_ptr"), "*i32")
    types |= {"scale": "fp32", "soft_cap": "fp32", "max_ptr": "*fp32", "sum_ptr": "*fp32"}
    if has_codes:
        types |= {"k_cache_ptr": "*i8", "v_cache_ptr": "*i8"}
    if codes == "int8":
        types |= {"k_scales_ptr": "*fp32", "v_scales_ptr": "*fp32"}
    else:
        constants |= {"k_scales_ptr": None, "v_scales_ptr": None}
    if not has_sinks:
        constants["sinks_ptr"] = None
    if shape.segments > 1 or num_owners > 1:
        types["out_ptr"] = "*fp32"
    else:
        constants |= {"max_ptr": None, "sum_ptr": None}
    return {
        "kernel": attention._attention_kernel,
        "constants": constants,
        "types": types,
        "options": {
            "num_warps": shape.num_warps,
            "num_stages": shape.num_stages,
            "maxnreg": shape.max_registers,
            "enable_fp_fusion": not is_deterministic or num_owners > 1,
        },
    }


POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


# Constants of a product without experts.
ONE_WEIGHT = {"begins_ptr": None, "order_ptr": None, "EXPERTS": 0, "OF_TOKENS": False}


def of_experts(case: dict[str, Any]) -> dict[str, Any]:
    """The same product with a stack of 128 experts."""
    constants = {name: value for name, value in case["constants"].items() if name not in ("begins_ptr", "order_ptr")}
    constants |= {"EXPERTS": 128, "OF_TOKENS": True}
    return case | {"constants": constants, "types": case["types"] | {"begins_ptr": "*i32", "order_ptr": "*i32"}}


def expert_cases(sm: int) -> dict[str, dict[str, Any]]:
    """Products with stacks of experts, routing, and sums."""
    is_wgmma, bf16 = sm == 90, torch.bfloat16
    found = {}
    for M in (1, 64):
        found[f"experts, dense, {M} rows"] = of_experts(dense_case(M, False, bf16, is_wgmma))
        found[f"experts, FP8, {M} rows"] = of_experts(fp8_case(M, False, False, is_wgmma))
        found[f"experts, FP8 in blocks, {M} rows"] = of_experts(fp8_case(M, False, True, is_wgmma))
        for name, form in (("AWQ", GroupedFormat(4, 128, "float16", "uint8")), ("Q4_K", GGUF["Q4_K"])):
            found[f"experts, {name}, {M} rows"] = of_experts(grouped_case(form, M, False, bf16, is_wgmma))
    for scoring, groups, is_top2 in (("softmax", 1, False), ("sigmoid", 8, True), ("softmax_of_chosen", 8, False)):
        found[f"route by {scoring} in {groups} groups"] = {
            "kernel": experts._route_kernel,
            "constants": {"S": 8, "SCORING": scoring, "GROUPS": groups, "ACTIVE_GROUPS": max(groups // 2, 1)}
            | {"IS_TOP2": is_top2, "NORMALIZES": True, "BLOCK_E": 256, "BLOCK_S": 8}
            | ({} if groups > 1 else {"bias_ptr": None, "copies_ptr": None, "places_ptr": None}),
            "types": dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr"), "*fp32")
            | dict.fromkeys(("experts_ptr", "copies_ptr", "places_ptr"), "*i32")
            | {"scale": "fp32", "jitter": "fp32"},
            "options": {"num_warps": 1},
        }
    found["route by sparsemixer"] = {
        "kernel": experts._route_kernel,
        "constants": {"S": 2, "SCORING": "sparsemixer", "GROUPS": 1, "ACTIVE_GROUPS": 1, "IS_TOP2": False}
        | {"NORMALIZES": False, "BLOCK_E": 16, "BLOCK_S": 2}
        | {"bias_ptr": None, "copies_ptr": None, "places_ptr": None},
        "types": {"logits_ptr": "*fp32", "weights_ptr": "*fp32", "experts_ptr": "*i32"}
        | {"scale": "fp32", "jitter": "fp32"},
        "options": {"num_warps": 1},
    }
    ints = dict.fromkeys(("experts_ptr", "order_ptr", "begins_ptr", "places_ptr"), "*i32")
    found["sort pairs"] = {"kernel": experts._sort_kernel, "constants": {"BLOCK_P": experts._BLOCK_P}, "types": ints}
    found["places"] = {"kernel": experts._places_kernel, "constants": {"BLOCK_P": experts._BLOCK_P}, "types": ints}
    found["combine"] = {
        "kernel": experts._combine_kernel,
        "constants": {"S": 8, "BLOCK_D": experts._BLOCK_D},
        "types": ints | {"weights_ptr": "*fp32", "gate_ptr": "*fp32"},
    }
    return found


def grouped_case(
    weight_format: GroupedFormat, M: int, is_split: bool, dtype: torch.dtype, wgmma: bool, is_even: bool = True
) -> dict[str, Any]:
    """The product of M rows with a weight cut into parts; `is_even`: of whole tiles of K, and panels in pairs."""
    assert weight_format.group_size is not None
    tile = parts.choose_tile(M, 4096 if is_even else 64, dtype, wgmma)
    scales = torch.uint8 if weight_format.scales == "e8m0" else getattr(torch, weight_format.scales)
    offsets = getattr(torch, weight_format.offsets or "", None)
    types = {"x_ptr": POINTERS[dtype], "words_ptr": "*i32", "scales_ptr": POINTERS[scales], "halves_ptr": "*fp16"}
    types |= {"offsets_ptr": POINTERS.get(offsets, ""), "out_ptr": "*fp32" if is_split else POINTERS[dtype]}
    constants = {
        **({} if weight_format.offsets else {"offsets_ptr": None}),
        "bias_ptr": None,
        "BITS": weight_format.bits,
        "ROWS": max(tile.block_k // weight_format.group_size, 1),
        "SCALE_BYTES": scales.itemsize,
        "HAS_FLOATS": weight_format.scales == "e8m0",
        "OFFSETS": {None: "none", "uint8": "zeros"}.get(weight_format.offsets, "minima"),
        "OFFSET_BYTES": offsets.itemsize if offsets else 1,
        "PARTS": 8,
        "IS_SPLIT": is_split,
        "HAS_BIAS": False,
        "EVEN_K": is_even,
        "UPCAST": False,
        **ONE_WEIGHT,
    }
    return tiled_case(grouped._grouped_kernel, constants, types, tile)


def dense_case(M: int, is_split: bool, dtype: torch.dtype, wgmma: bool, is_even: bool = True) -> dict[str, Any]:
    """The product of M rows with a weight in floating point."""
    constants = {
        "bias_ptr": None,
        "PARTS": 8,
        "IS_SPLIT": is_split,
        "HAS_BIAS": False,
        "EVEN_K": is_even,
        "UPCAST": False,
        **ONE_WEIGHT,
    }
    types = dict.fromkeys(("x_ptr", "weight_ptr"), POINTERS[dtype])
    types["out_ptr"] = "*fp32" if is_split else POINTERS[dtype]
    return tiled_case(dense._dense_kernel, constants, types, dense.for_dense(parts.choose_tile(M, 4096, dtype, wgmma)))


def fp8_case(M: int, is_split: bool, is_grouped: bool, wgmma: bool) -> dict[str, Any]:
    """The product of M rows with an FP8 weight cut into parts."""
    constants = {
        "bias_ptr": None,
        "IS_GROUPED": is_grouped,
        "PARTS": 8,
        "IS_SPLIT": is_split,
        "HAS_BIAS": False,
        "EVEN_K": True,
        "UPCAST": False,
        **ONE_WEIGHT,
    }
    types = {"codes_ptr": "*i8", "scales_ptr": "*fp32", "out_ptr": "*fp32" if is_split else "*bf16"}
    tile = parts.choose_tile(M, 4096, torch.bfloat16, wgmma)
    tile = fp8.in_groups(tile, 128) if is_grouped else tile
    case = tiled_case(fp8._fp8_kernel, constants, types, tile)
    case["options"]["enable_fp_fusion"] = False
    return case


def tiled_case(kernel: Any, constants: dict[str, Any], types: dict[str, str], tile: parts.Tile) -> dict[str, Any]:
    """Sizes and bytes of sections are multiples of 16, as in weights that models have."""
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    return {
        "kernel": kernel,
        "constants": {**constants, **blocks},
        "types": types,
        "options": {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        "multiples": (
            "N",
            "K",
            "group_size",
            "part_len",
            *(x for x in kernel.arg_names if x.endswith(("_bytes", "_at"))),
        ),
    }


def deterministic_cases(sm: int) -> dict[str, dict[str, Any]]:
    """Kernels of the deterministic mode, with the tiles of this architecture."""
    sizes = {"prefill": (2048, 4), "decode": (256, 256), "split decode": (1, 1)}
    found = {
        f"deterministic {name}{' of wide heads' * (head_dim > 128)} of {codes}": attention_case(
            *counts, group, head_dim, codes, sm, is_deterministic=True
        )
        for name, counts in sizes.items()
        for group, head_dim in ((4, 128), (2, 256))
        for codes in ("none", "e4m3", "e5m2", "int8")
    }
    found["join ranges"] = {
        "kernel": attention._join_ranges_kernel,
        "constants": {"H": 32, "E": 128, "BLOCK_E": 128, "SEGMENTS": 32, "sinks_ptr": None},
        "types": {"partial_ptr": "*fp32", "max_ptr": "*fp32", "sum_ptr": "*fp32"},
        "options": {"enable_fp_fusion": False},
    }
    for M, is_split in ((1, True), (64, True), (2048, False)):
        found[f"dense, {M} rows"] = dense_case(M, is_split, torch.bfloat16, sm == 90)
    found["dense, float32"] = dense_case(1, True, torch.float32, sm == 90)
    found["dense, float16"] = dense_case(2048, False, torch.float16, sm == 90)
    found["dense, uneven"] = dense_case(2048, False, torch.bfloat16, sm == 90, is_even=False)
    return found


def code_cases(sm: int) -> dict[str, dict[str, Any]]:
    """Attention over caches of codes, with the tiles of this architecture."""
    sizes = {
        "prefill": (2048, 4, 4, 128),
        "prefill of wide heads": (2048, 4, 2, 256),
        "decode": (256, 256, 4, 128),
        "decode of wide heads": (256, 256, 2, 256),
        "split decode": (1, 1, 4, 128),
    }
    return {
        f"{name} of {codes}": attention_case(*of_name, codes, sm)
        for name, of_name in sizes.items()
        for codes in ("e4m3", "e5m2", "int8")
    }


# Query heads per KV head, and dimensions of a head.
MODELS = {
    "Qwen2.5-0.5B": (7, 64),
    "Llama-3.2-1B": (4, 64),
    "Phi-3-mini": (1, 96),
    "Qwen3-0.6B": (2, 128),
    "Llama-3.2-3B": (3, 128),
    "Qwen2.5-14B": (5, 128),
    "Qwen2.5-7B": (7, 128),
    "Qwen3-32B": (8, 128),
    "Gemma-3-1B": (4, 256),
}


def model_cases(sm: int) -> dict[str, dict[str, Any]]:
    """Attention with the heads of models: groups that divide a tile and groups that do not."""
    sizes = {"prompts": (2048, 4), "decodes": (256, 256)}
    found = {
        f"{name}, {kind} of {codes}": attention_case(*counts, *heads, codes, sm)
        for name, heads in MODELS.items()
        for kind, counts in sizes.items()
        for codes in ("none", "e4m3", "int8")
    }
    for name in ("Qwen2.5-0.5B", "Qwen2.5-7B", "Gemma-3-1B"):
        for kind, counts in sizes.items():
            found[f"{name}, {kind}, float32"] = attention_case(*counts, *MODELS[name], "none", sm, dtype=torch.float32)
            found[f"{name}, {kind}, deterministic"] = attention_case(*counts, *MODELS[name], "int8", sm, True)
    return found


def product_cases(sm: int) -> dict[str, dict[str, Any]]:
    """Products with quantized weights, with the tiles of this architecture."""
    forms = {
        "AWQ": GroupedFormat(4, 128, "float16", "uint8"),
        "Q4_K": GGUF["Q4_K"],
        "Q2_K": GGUF["Q2_K"],
        "Q3_K": GGUF["Q3_K"],
        "Q5_K": GGUF["Q5_K"],
        "Q6_K": GGUF["Q6_K"],
        "8 bits": GroupedFormat(8, 4096),
        "MXFP4": MXFP4,
    }
    found = {
        f"{name}, {M} rows": grouped_case(form, M, is_split, torch.bfloat16, sm == 90)
        for name, form in forms.items()
        for M, is_split in ((1, True), (64, True), (2048, False))
    }
    found["AWQ, float32"] = grouped_case(forms["AWQ"], 1, True, torch.float32, sm == 90)
    found["AWQ, float16"] = grouped_case(forms["AWQ"], 2048, False, torch.float16, sm == 90)
    found["AWQ, uneven"] = grouped_case(forms["AWQ"], 2048, False, torch.bfloat16, sm == 90, is_even=False)
    found["8 bits, uneven"] = grouped_case(forms["8 bits"], 64, True, torch.bfloat16, sm == 90, is_even=False)
    for M, is_split in ((1, True), (64, True), (2048, False)):
        found[f"FP8, {M} rows"] = fp8_case(M, is_split, False, sm == 90)
        found[f"FP8 in blocks, {M} rows"] = fp8_case(M, is_split, True, sm == 90)
    found["rows to FP8"] = {
        "kernel": fp8._quantize_rows_kernel,
        "constants": {"BLOCK_K": 16384},
        "types": {"codes_ptr": "*i8", "scales_ptr": "*fp32"},
        "options": {"num_warps": 16},
    }
    found["join parts"] = {
        "kernel": parts._join_kernel,
        "constants": {"PARTS": 8, "HAS_BIAS": True, "BLOCK_N": parts._JOINED},
        "types": {"partial_ptr": "*fp32"},
    }
    return found


SAMPLING_TYPES = {
    **dict.fromkeys(("logits_ptr", "highest_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr"), "*fp32"),
    **dict.fromkeys(("k_masses_ptr", "p_masses_ptr", "total_ptr", "above_ptr", "ties_ptr", "tie_units_ptr"), "*i64"),
    **dict.fromkeys(("greedy_ptr", "token_ptr"), "*i64"),
    "top_k_ptr": "*i32",
    "uniform_ptr": "*fp64",
    "smallest_temperature": "fp32",
}


def sampling_case(kernel: Any, **constants: Any) -> dict[str, Any]:
    return {"kernel": kernel, "constants": {"SLICE": sampling.SLICE, **constants}, "types": SAMPLING_TYPES}


def rope_case(codes: str) -> dict[str, Any]:
    constants = {"H": 32, "E": 128, "P": 16, "R": 128, "BLOCK_E": 128, "HAS_Q_NORM": True, "HAS_K_NORM": True}
    constants["HAS_TEMPERATURE"] = True
    types = {
        "positions_ptr": "*i64",
        "slots_ptr": "*i64",
        "cos_sin_ptr": "*fp32",
        **dict.fromkeys(("eps", "weight_offset", "temperature", "temperature_floor"), "fp32"),
    }
    if codes != "none":
        types |= {"k_cache_ptr": "*i8", "v_cache_ptr": "*i8"}
    scales = {"k_scales_ptr": None, "v_scales_ptr": None}
    if codes == "int8":
        types |= dict.fromkeys(scales, "*fp32")
    return {
        "kernel": rope_cache._rope_and_cache_kernel,
        "constants": {**constants, "CODES": codes, **({} if codes == "int8" else scales)},
        "types": types,
        "options": {"num_warps": 1, "enable_fp_fusion": False},
    }


def latent_cases() -> dict[str, dict[str, Any]]:
    """Latent attention of DeepSeek's models, and the rotation before it."""
    found = {}
    sizes = {"V": 512, "R": 64, "P": 16}
    for codes in ("none", "e4m3", "e5m2", "int8"):
        types: dict[str, str] = {"cache_ptr": "*bf16" if codes == "none" else "*i8", "scales_ptr": "*fp32"}
        no_scales = {} if codes == "int8" else {"scales_ptr": None}
        for name, H, segments, dtype, num_owners in (
            ("latent prompts", 16, 1, torch.bfloat16, 1),
            ("latent decodes, split", 128, 8, torch.bfloat16, 1),
            ("latent prompts, float32", 16, 1, torch.float32, 1),
            ("latent prompts, some pages", 32, 1, torch.bfloat16, 2),
        ):
            if dtype == torch.float32 and codes != "none":
                continue
            is_whole = segments == num_owners == 1
            no_sums = {"max_ptr": None, "sum_ptr": None} if is_whole else {}
            pages = {"OWNERS": num_owners, "OWNER": num_owners - 1} | ({"P": 256} if num_owners > 1 else {})
            cache = POINTERS[dtype] if codes == "none" else "*i8"
            tables = dict.fromkeys(("block_tables_ptr", "seq_lens_ptr", "cu_seqlens_ptr"), "*i32")
            sums = dict.fromkeys(("max_ptr", "sum_ptr"), "*fp32")
            found[f"{name} of {codes}"] = {
                "kernel": latent._latent_attention_kernel,
                "constants": sizes
                | no_scales
                | no_sums
                | latent.blocks(H, 512, 64, dtype)
                | {"H": H, "SEGMENTS": segments, "RANGE": 1024 if num_owners == 1 else 256}
                | {"CODES": codes, "UPCAST": False}
                | pages,
                "types": types
                | tables
                | sums
                | {"q_ptr": POINTERS[dtype], "cache_ptr": cache, "scale": "fp32"}
                | {"out_ptr": POINTERS[dtype] if is_whole else "*fp32"},
                "options": latent.options(dtype),
            }
        found[f"latent rope to {codes}"] = {
            "kernel": latent._latent_rope_and_cache_kernel,
            "constants": sizes
            | no_scales
            | {"H": 16, "BLOCK_L": 1024, "BLOCK_R": 32, "STEP": 2, "SECOND": 1, "CODES": codes},
            "types": types | {"positions_ptr": "*i64", "slots_ptr": "*i64", "cos_sin_ptr": "*fp32"},
            "options": {"num_warps": 4, "enable_fp_fusion": False},
        }
    return found


def lora_cases() -> dict[str, dict[str, Any]]:
    """Additions to q, k and v, and to embeddings, at two sizes of rank."""
    found = {}
    for max_rank in (16, 256):
        shared = {"PARTS": 3, "MAX_RANK": max_rank, "NONE": lora._NONE, "BLOCK_T": lora._BLOCK_T}
        shared["BLOCK_R"] = lora._BLOCK_R
        types = {"slots_ptr": "*i32", "table_ptr": "*i64", "sums_ptr": "*fp32", "base_ptr": "*fp32"}
        for looks_up in (False, True):
            found[f"{'look-up' if looks_up else 'shrink'} of rank {max_rank}"] = {
                "kernel": lora._shrink_kernel,
                "constants": shared | {"LOOKS_UP": looks_up, "BLOCK_K": lora._BLOCK_K, "UPCAST": False},
                "types": types | ({"x_ptr": "*i64"} if looks_up else {}),
                "multiples": ("K",),
                "options": {"num_warps": 4},
            }
        found[f"expand of rank {max_rank}"] = {
            "kernel": lora._expand_kernel,
            "constants": shared | {"PANEL": lora.LORA_PANEL, "BLOCK_N": lora._BLOCK_N},
            "types": types,
            "multiples": ("columns", "first_column"),
            "options": {"num_warps": 4},
        }
    return found


def cases() -> dict[str, dict[str, Any]]:
    join = {"H": 32, "E": 128, "BLOCK_E": 128, "SEGMENTS": 32}
    norm_constants = {"D": 4096, "BLOCK_D": 4096, "HAS_RESIDUAL": True}
    norm_types = {"multiplier": "fp32", "eps": "fp32", "weight_offset": "fp32"}
    return (
        lora_cases()
        | latent_cases()
        | {
            "rope": rope_case("none"),
            "rope to e4m3": rope_case("e4m3"),
            "rope to e5m2": rope_case("e5m2"),
            "rope to int8": rope_case("int8"),
            "prefill": attention_case(2048, 4, 4, 128),
            "prefill of wide heads": attention_case(2048, 4, 2, 256),
            "prefill with window and sinks": attention_case(2048, 4, 8, 64, window=128, has_sinks=True),
            "decode with window and sinks": attention_case(256, 256, 8, 64, window=128, has_sinks=True),
            "prefill with chunks": attention_case(2048, 4, 5, 128, chunk=8192),
            "decode with chunks": attention_case(256, 256, 5, 128, chunk=8192),
            "prefill with window and cap": attention_case(2048, 4, 2, 256, window=4096, has_soft_cap=True),
            "decode with window and cap": attention_case(256, 256, 2, 256, window=4096, has_soft_cap=True),
            "decode of wide heads": attention_case(256, 256, 2, 256),
            "decode": attention_case(256, 256, 4, 128),
            "split decode": attention_case(1, 1, 4, 128),
            "prefill of some pages": attention_case(2048, 4, 16, 128, is_deterministic=True, num_owners=2),
            "decode of some pages": attention_case(256, 256, 16, 128, is_deterministic=True, num_owners=2),
            "join": {
                "kernel": attention._join_segments_kernel,
                "constants": join | {"sinks_ptr": None},
                "types": {"partial_ptr": "*fp32", "max_ptr": "*fp32", "sum_ptr": "*fp32"},
            },
            "join with sinks": {
                "kernel": attention._join_segments_kernel,
                "constants": join,
                "types": {"partial_ptr": "*fp32", "max_ptr": "*fp32", "sum_ptr": "*fp32"},
            },
            "norm to FP8": {
                "kernel": norm._norm_kernel,
                "constants": norm_constants | {"IS_QUANTIZED": True, "bias_ptr": None},
                "types": norm_types | {"out_ptr": "*i8", "scales_ptr": "*fp32"},
                "options": {"num_warps": 8},
            },
            "silu to FP8": {
                "kernel": activation._quantized_activation_kernel,
                "constants": {"NAME": "silu", "BLOCK": 16384},
                "types": {"codes_ptr": "*i8", "scales_ptr": "*fp32"},
                "options": {"num_warps": 16},
            },
            "norm": {
                "kernel": norm._norm_kernel,
                "constants": norm_constants | {"IS_QUANTIZED": False, "scales_ptr": None, "bias_ptr": None},
                "types": norm_types,
                "options": {"num_warps": 8},
            },
            "layer norm": {
                "kernel": norm._norm_kernel,
                "constants": norm_constants | {"IS_QUANTIZED": False, "scales_ptr": None},
                "types": norm_types,
                "options": {"num_warps": 8},
            },
            **{
                name: {
                    "kernel": activation._gated_activation_kernel,
                    "constants": {"NAME": name, "BLOCK": 1024}
                    | dict.fromkeys(("factors_ptr", "order_ptr", "begins_ptr")),
                }
                for name in ("silu", "clamped_swiglu")
            },
            "silu with factors, of some rows": {
                "kernel": activation._gated_activation_kernel,
                "constants": {"NAME": "silu", "BLOCK": 1024},
                "types": {"factors_ptr": "*fp32", "order_ptr": "*i32", "begins_ptr": "*i32"},
            },
            "greedy": {
                "kernel": sampling._highest_kernel,
                "constants": {"SLICE": sampling.SLICE},
                "types": {"logits_ptr": "*fp32", "highest_ptr": "*fp32", "token_ptr": "*i32"},
            },
            "forbid tokens": {
                "kernel": sampling._forbid_kernel,
                "constants": {"SLICE": sampling.SLICE},
                "types": {"logits_ptr": "*fp32", "masks_ptr": "*i32", "rows_ptr": "*i32"},
            },
            "join greedy": {
                "kernel": sampling._join_highest_kernel,
                "constants": {"BLOCK_B": 64},
                "types": {
                    **dict.fromkeys(("highest_ptr", "row_highest_ptr"), "*fp32"),
                    "token_ptr": "*i32",
                    "row_token_ptr": "*i64",
                },
            },
            "search of top-k": sampling_case(sampling._search_k_kernel, ROUND=7),
            "search of top-p": sampling_case(sampling._search_p_kernel, ROUND=7),
            "total": sampling_case(sampling._total_kernel),
            "slices": sampling_case(sampling._weigh_slices_kernel),
            "draw": sampling_case(sampling._draw_kernel, BLOCK_B=64),
        }
    )


def compiled(case: dict[str, Any], capability: int) -> dict[str, Any]:
    kernel, constants = case["kernel"], case["constants"]
    types = signature(kernel, constants, case.get("types", {}))
    # facts that a launch finds in its arguments: addresses and strides are multiples of 16
    multiples = case.get("multiples", ())
    aligned = [
        i
        for i, name in enumerate(kernel.arg_names)
        if types[name].startswith("*") or "_stride" in name or name in multiples
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned if types[kernel.arg_names[i]] != "constexpr"}
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=case.get("options", {}))
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        code = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    words = dict(word.split(":") for word in usage.split() if word.count(":") == 1)
    return {
        "stack": int(words["STACK"]),
        "registers": int(words["REG"]),
        "shared": binary.metadata.shared,
        "has_wgmma": "HGMMA" in code,
    }


def all_cases(sm: int) -> dict[str, dict[str, Any]]:
    return {
        **cases(),
        **code_cases(sm),
        **model_cases(sm),
        **product_cases(sm),
        **deterministic_cases(sm),
        **expert_cases(sm),
    }


def compiled_by_name(name: str, sm: int) -> dict[str, Any]:
    return compiled(all_cases(sm)[name], sm)


if __name__ == "__main__":
    names = [(name, sm) for sm in (80, 90) for name in all_cases(sm)]
    with ProcessPoolExecutor() as pool:
        found = pool.map(compiled_by_name, *zip(*names, strict=True), chunksize=4)
        json.dump({f"{name}, sm_{sm}": usage for (name, sm), usage in zip(names, found, strict=True)}, sys.stdout)
