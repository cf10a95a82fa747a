"""Values of vLLM's settings that this version refuses, with the reason and the alternative."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignValues:
    """Values of one setting that are refused for the same reason. A value that ends in `*` stands for a prefix."""

    values: tuple[str, ...]
    text: str
    instead: str

    def covers(self, value: str) -> bool:
        return any(value.startswith(known[:-1]) if known.endswith("*") else value == known for known in self.values)


# vLLM's values that have the meaning of one of our values.
SAME_VALUES: dict[str, dict[str, str]] = {
    "load_format": {"hf": "auto"},
    "quantization": {"fp8_per_channel": "fp8"},  # a scale per output channel
    "spec_method": {
        "[ngram]": "ngram",
        "ngram_gpu": "ngram",
        "mimo_mtp": "mtp",
        "deepseek_mtp": "mtp",
        "glm4_moe_mtp": "mtp",
    },
}

_QUANTIZE_ON_LOAD = "Name the same model in bfloat16, float16 or float32, with --quantization int8, int4 or fp8"

_OTHER_MTP = """
    dots3_note_mtp mimo_v2_mtp glm4_moe_lite_mtp glm_ocr_mtp ernie_mtp nemotron_h_mtp
    exaone_moe_mtp exaone4_5_mtp qwen3_next_mtp qwen4_exp_mtp qwen3_5_mtp longcat_flash_mtp bailing_hybrid_v3_mtp
    bailing_hybrid_mtp minimax_m3_mtp kimi_k3_mtp pangu_ultra_moe_mtp step3p5_mtp hy_v3_mtp hy_v4_mtp gemma4_mtp
    inkling_mtp glm5_next_mtp
"""

FOREIGN_VALUES: dict[str, tuple[ForeignValues, ...]] = {
    "kv_cache_dtype": (
        ForeignValues(("int8*",), "int8 has a scale per token and KV head here, and no other form", "Use int8"),
        ForeignValues(
            ("fp8*", "nvfp4*", "int4*", "int2*", "turboquant*"),
            "this layout of other devices or models is not in this version",
            "Use fp8 or fp8_e5m2 (half the bytes of bfloat16), or int8 (with scales)",
        ),
    ),
    "quantization": (
        ForeignValues(
            ("fp8_per_tensor", "fp8_per_block", "ptpc_fp8"),
            "weights that are quantized while they load have a scale per output channel",
            "Use fp8",
        ),
        ForeignValues(
            ("int8_per_channel_weight_only", "experts_int8", "moe_wna16", "nvfp4_per_token"),
            "experts have no format of their own here",
            "Use int8 or int4, which quantize every linear layer while it loads",
        ),
        ForeignValues(
            ("mxfp8", "modelopt_*", "fp_quant", "deepseek_v4_fp8"),
            "these numbers in floating point with a scale for a few elements are not read",
            _QUANTIZE_ON_LOAD,
        ),
        ForeignValues(
            ("bitsandbytes", "quark", "torchao", "inc", "auto-round", "humming", "hqq", "aqlm"),
            "checkpoints of this quantizer are not read",
            f"{_QUANTIZE_ON_LOAD}, or one quantized with AWQ, GPTQ, compressed-tensors, FP8 or as a GGUF file",
        ),
        ForeignValues(
            ("online",),
            "it asks for formats by layer in --quantization-config, which is not in this version",
            "Use int8, int4 or fp8",
        ),
    ),
    "load_format": (
        ForeignValues(
            ("pt", "npcache", "bin"),
            "pickled checkpoints are never read: they can run code",
            "Convert the model to safetensors, or name a repository that has them",
        ),
        ForeignValues(
            ("bitsandbytes",),
            "checkpoints of bitsandbytes are not read",
            _QUANTIZE_ON_LOAD,
        ),
        ForeignValues(
            ("runai_streamer", "runai_streamer_sharded", "tensorizer"),
            "safetensors and GGUF files in an object store are streamed without a format of their own",
            "Leave it out, and name the folder of the model by its URL, such as s3://bucket/folder (gs://, az://)",
        ),
        ForeignValues(
            ("mistral", "sharded_state", "fastsafetensors", "instanttensor"),
            "only safetensors checkpoints and GGUF files are read",
            "Leave it out",
        ),
    ),
    "tokenizer_mode": (
        ForeignValues(
            ("mistral", "custom", "deepseek_v*", "cohere", "grok2", "qwen_vl", "kimi*"),
            "tokenizers are read from tokenizer.json",
            "Leave it out, or use slow to convert the tokenizer through transformers",
        ),
    ),
    "logprobs_mode": (
        ForeignValues(
            ("raw_logits", "processed_logits"),
            "log probabilities are returned, not logits",
            "Use raw_logprobs or processed_logprobs",
        ),
    ),
    "attention_backend": (
        ForeignValues(
            (
                "FLASH*",
                "ROCM*",
                "TORCH_SDPA",
                "FLEX_ATTENTION",
                "TREE_ATTN",
                "XFORMERS",
                "CUTLASS*",
                "TRITON*",
            ),
            "there are FlashInfer and our own kernels",
            "Leave it out, or use FLASHINFER, TRITON_ATTN or CPU_ATTN",
        ),
    ),
    "spec_method": (
        ForeignValues(
            ("eagle",),
            "EAGLE's first heads are not in this version, and this is the name of no EAGLE-3 checkpoint",
            "Name an EAGLE-3 checkpoint of the model, with method eagle3",
        ),
        ForeignValues(
            ("medusa",),
            "Medusa's heads draft trees, and drafts are chains here",
            "Use an EAGLE-3 head or a draft model",
        ),
        ForeignValues(
            ("mlp_speculator",), "MLP speculators are not in this version", "Use an EAGLE-3 head or a draft model"
        ),
        ForeignValues(
            ("dflash", "dspark"),
            "a drafter of whole blocks, whose attention is not causal, is not in this version",
            "Use an EAGLE-3 head or a draft model",
        ),
        ForeignValues(("lookahead",), "lookahead decoding is not in this version", "Use ngram or suffix"),
        ForeignValues(("custom_class",), "no code is loaded by name", "Use one of the methods there are"),
        ForeignValues(
            ("extract_hidden_states",), "hidden states are not handed out", "Use one of the methods there are"
        ),
        ForeignValues(
            tuple(_OTHER_MTP.split()),
            "of the layers for multi-token prediction only those of MiMo, DeepSeek-V3 and GLM-4.5 are built",
            "Use ngram, suffix or a draft model",
        ),
    ),
    "model_impl": (ForeignValues(("terratorch",), "models here generate text only", "Leave it out"),),
}


def why_not(name: str, value: object) -> ForeignValues | None:
    """The entry for a value of vLLM's that the setting `name` refuses here; None: there is no such entry."""
    return next((entry for entry in FOREIGN_VALUES.get(name, ()) if entry.covers(str(value))), None)
