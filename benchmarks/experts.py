"""Decodes of a model with experts beside other engines, on the same weights.

    python benchmarks/experts.py write MODEL.gguf [--shape OLMoE-1B-7B]
    python benchmarks/experts.py write FOLDER --shape Qwen3-30B-A3B-4-layers
    python benchmarks/experts.py run MODEL.gguf --peer llama.cpp "python benchmarks/peers/speculating.py
                        llama-cpp-python {model} --requests 32" [--requests 1,8,32] [--rounds 5] [--save HARDWARE]
    python benchmarks/experts.py run FOLDER --quantization int4 --peer vLLM "python benchmarks/peers/speculating.py
                        vllm {model} --requests 32"

`write MODEL.gguf` makes an OLMoE in Q4_0 with random blocks. `write FOLDER` makes a Qwen3-MoE in bfloat16 with random
weights, and the same weights in FOLDER/bf16.gguf for llama.cpp. Random routers choose experts uniformly, which is the
worst case for a batch. The tokenizer is the demo model's, and the text says nothing. Other engines need their own form
of a folder, e.g. `optimum-cli export openvino --model FOLDER --weight-format int4 OUT` or `llama-quantize --pure
FOLDER/bf16.gguf OUT.gguf Q4_0`.

`run` takes engines in turns, in one run: each request is a prompt of `--input` random tokens and `--tokens` greedy
tokens. --peer adds an engine, as a command that speaks the protocol of benchmarks/peers/speculating.py; {model} stands
for the file or folder. --quantization is Quire's own.

The limit of a step is the bytes that it reads, over the bandwidth measured between rounds: all weights but experts,
and the distinct experts that this number of rows hits if all are equally likely.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from peers.process import Peer
from safetensors.torch import save_file
from torch import Tensor

import quire.demo
from quire import LLM, SamplingParams
from quire.kernels import cpu
from quire.layer_spec import distinct_experts
from quire.measure import report
from quire.model_config import ModelConfig, load_model_config

OURS = "Quire"
Q4_0 = gguf.GGMLQuantizationType.Q4_0
DEVIATION = 0.02  # the standard deviation of the weights
READ_BYTES = 1 << 30  # are read to measure the bandwidth: more than the largest L3 cache so far, 480 MiB


@dataclass(frozen=True)
class Shape:
    """The shape of a model.

    E is the number of experts, S the number of active ones, D the hidden size, I the inner size, and V the size of the
    vocabulary. Heads have 128 elements, and there are `kv_heads` heads of keys.
    """

    num_layers: int
    E: int
    S: int
    D: int
    I: int  # noqa: E741
    V: int
    heads: int
    kv_heads: int


SHAPES = {
    "OLMoE-1B-7B": Shape(16, 64, 8, 2048, 1024, 50_304, 16, 16),
    "OLMoE-8-layers": Shape(8, 64, 8, 2048, 1024, 50_304, 16, 16),
    "Qwen3-30B-A3B-4-layers": Shape(4, 128, 8, 2048, 768, 8192, 32, 4),
    "Qwen3-30B-A3B-2-layers": Shape(2, 128, 8, 2048, 768, 8192, 32, 4),
    "tiny": Shape(2, 8, 2, 256, 64, 8192, 2, 2),
}


def gguf_writer(path: Path, family: str, shape: Shape, file_type: gguf.LlamaFileType) -> gguf.GGUFWriter:
    """A writer with all metadata and without tensors."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.D)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.I)
    writer.add_expert_feed_forward_length(shape.I)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(shape.E)
    writer.add_expert_used_count(shape.S)
    writer.add_file_type(file_type)
    add_tokenizer(writer, shape.V)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, shape: Shape) -> None:
    """Write an OLMoE in Q4_0."""
    writer, generator, D = (
        gguf_writer(path, "olmoe", shape, gguf.LlamaFileType.MOSTLY_Q4_0),
        np.random.default_rng(0),
        shape.D,
    )

    def add(name: str, *sizes: int) -> None:
        blocks = generator.integers(0, 256, (*sizes[:-1], sizes[-1] // 32, 18), dtype=np.uint8)
        blocks[..., :2] = np.array([DEVIATION / 4.6], np.float16).view(np.uint8)  # the deviation of the codes
        writer.add_tensor(f"{name}.weight", blocks.reshape(*sizes[:-1], -1), raw_dtype=Q4_0)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(D, np.float32))

    add("token_embd", shape.V, D)
    add("output", shape.V, D)
    add_norm("output_norm")
    for prefix in (f"blk.{layer}." for layer in range(shape.num_layers)):
        for name in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"):
            add_norm(prefix + name)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(prefix + name, D, D)
        router = generator.standard_normal((shape.E, D), np.float32) * DEVIATION
        writer.add_tensor(f"{prefix}ffn_gate_inp.weight", router)
        add(f"{prefix}ffn_gate_exps", shape.E, shape.I, D)
        add(f"{prefix}ffn_up_exps", shape.E, shape.I, D)
        add(f"{prefix}ffn_down_exps", shape.E, D, shape.I)
    finish(writer)


def write_folder(folder: Path, shape: Shape) -> None:
    """Write a Qwen3-MoE in bfloat16, as a checkpoint of transformers and as a GGUF file with the same numbers."""
    folder.mkdir()
    writer = gguf_writer(folder / "bf16.gguf", "qwen3moe", shape, gguf.LlamaFileType.MOSTLY_BF16)
    E, D, I, V = shape.E, shape.D, shape.I, shape.V  # noqa: E741
    generator = random.Random(0)
    numbers = torch.randn(64 << 20, generator=torch.Generator().manual_seed(0)).mul_(DEVIATION).to(torch.bfloat16)
    files: dict[str, str] = {}

    def matrix(rows: int, columns: int) -> Tensor:
        begin = generator.randrange(len(numbers) - rows * columns)
        return numbers[begin : begin + rows * columns].view(rows, columns)

    def add(part: dict[str, Tensor], name: str, other_name: str, *sizes: int) -> None:
        """Add a tensor: three sizes are a matrix for each expert, two sizes a matrix, and one size a norm."""
        if len(sizes) == 1:
            weight = torch.ones(sizes, dtype=torch.bfloat16)
            writer.add_tensor(f"{other_name}.weight", weight.float().numpy())
        else:
            weight = torch.stack([matrix(*sizes[-2:]) for _ in range(sizes[0] if len(sizes) == 3 else 1)]).view(sizes)
            if other_name.endswith("gate_inp"):
                writer.add_tensor(f"{other_name}.weight", weight.float().numpy())
            else:
                codes = weight.view(torch.uint8).numpy()
                writer.add_tensor(f"{other_name}.weight", codes, raw_dtype=gguf.GGMLQuantizationType.BF16)
        for number, each in enumerate(weight if len(sizes) == 3 else [weight]):
            part[f"{name.replace('*', str(number))}.weight"] = each.clone()

    def save(part: dict[str, Tensor], file: str) -> None:
        save_file(part, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(part, file))

    part: dict[str, Tensor] = {}
    add(part, "model.embed_tokens", "token_embd", V, D)
    add(part, "lm_head", "output", V, D)
    add(part, "model.norm", "output_norm", D)
    save(part, "outside.safetensors")
    for layer in range(shape.num_layers):
        part, name, other_name = {}, f"model.layers.{layer}.", f"blk.{layer}."
        add(part, f"{name}input_layernorm", f"{other_name}attn_norm", D)
        add(part, f"{name}post_attention_layernorm", f"{other_name}ffn_norm", D)
        add(part, f"{name}self_attn.q_norm", f"{other_name}attn_q_norm", 128)
        add(part, f"{name}self_attn.k_norm", f"{other_name}attn_k_norm", 128)
        add(part, f"{name}self_attn.q_proj", f"{other_name}attn_q", shape.heads * 128, D)
        add(part, f"{name}self_attn.k_proj", f"{other_name}attn_k", shape.kv_heads * 128, D)
        add(part, f"{name}self_attn.v_proj", f"{other_name}attn_v", shape.kv_heads * 128, D)
        add(part, f"{name}self_attn.o_proj", f"{other_name}attn_output", D, shape.heads * 128)
        add(part, f"{name}mlp.gate", f"{other_name}ffn_gate_inp", E, D)
        add(part, f"{name}mlp.experts.*.gate_proj", f"{other_name}ffn_gate_exps", E, I, D)
        add(part, f"{name}mlp.experts.*.up_proj", f"{other_name}ffn_up_exps", E, I, D)
        add(part, f"{name}mlp.experts.*.down_proj", f"{other_name}ffn_down_exps", E, D, I)
        save(part, f"layer-{layer}.safetensors")
    finish(writer)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": I,
        "moe_intermediate_size": I,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 128,
        "num_experts": E,
        "num_experts_per_tok": shape.S,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(quire.demo.path() / file, folder / file)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Add the demo model's tokenizer, and further tokens that no text has."""
    content = json.loads((quire.demo.path() / "tokenizer.json").read_text())
    tokens = [f"[PAD{token}]" for token in range(vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * vocab_size
    special = {token["id"]: token["content"] for token in content["added_tokens"]}
    for text, token in content["model"]["vocab"].items():
        tokens[token], kinds[token] = text, gguf.TokenType.NORMAL
    for token, text in special.items():
        tokens[token], kinds[token] = text, gguf.TokenType.CONTROL
    merges = [" ".join(each) if isinstance(each, list) else each for each in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(min(special))
    writer.add_eos_token_id(max(special))


class Ours:
    """Quire in this process."""

    def __init__(self, model: Path, quantization: str | None, num_requests: int) -> None:
        self._llm = LLM(
            str(model),
            quantization=quantization,
            max_model_len=1024,
            max_num_seqs=num_requests,
            enable_prefix_caching=False,
        )

    def seconds(self, prompts: list[list[int]], num_tokens: int) -> float:
        """The seconds from the prompts to the last token of all requests."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started


def step_limit(config: ModelConfig, quantization: str | None, num_rows: int, bandwidth: float) -> float:
    """The seconds of a decode step that only reads."""
    num_bytes = float(config.read_bytes_per_step("bfloat16", quantization))
    for part, of_expert in config.expert_bytes("bfloat16", quantization):
        num_bytes += of_expert * (distinct_experts(part.num_experts, part.num_active, num_rows) - part.num_active)
    return num_bytes / bandwidth


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run rounds of every number of requests, with every engine in turns."""
    config, quantization = load_model_config(arguments.model), arguments.quantization
    engines: dict[str, Ours | Peer] = {OURS: Ours(arguments.model, quantization, max(arguments.requests))}
    engines |= {name: Peer(command.replace("{model}", str(arguments.model))) for name, command in arguments.peer}
    generator, cases = random.Random(0), []
    for requests in arguments.requests:
        rounds: list[dict[str, float]] = []
        for number in range(-1, arguments.rounds):  # the first one warms up
            prompts = [[generator.randrange(10, 4000) for _ in range(arguments.input)] for _ in range(requests)]
            found = {"limit": step_limit(config, quantization, requests, cpu.read_bandwidth(READ_BYTES, repeats=2))}
            for name in engines if number % 2 == 0 else reversed(engines):
                engine = engines[name]
                if isinstance(engine, Peer):
                    found[name] = engine.ask({"prompts": prompts, "num_tokens": arguments.tokens}, "seconds")
                else:
                    found[name] = engine.seconds(prompts, arguments.tokens)
            if number >= 0:
                rounds.append(found)
        cases.append({"requests": requests, "rounds": rounds})
    for engine in engines.values():
        if isinstance(engine, Peer):
            engine.close()
    return {"peers": [name for name in engines if name != OURS], "cases": cases}


def markdown(result: dict[str, Any]) -> str:
    """The result file for people, with medians over rounds. A ratio is the median of the rounds' ratios."""
    peers, tokens = result["peers"], result["tokens"]
    lines = report.heading("Experts beside other engines", result)
    form = f", {result['quantization']}" if result["quantization"] else ""
    turns = f"{tokens} tokens after {result['input']}; {result['rounds']} rounds in turns."
    lines += [f"- {result['model']}{form}; {turns}", ""]
    columns = [f"{name}, tokens/s" for name in (OURS, *peers)] + [f"{OURS} / {name}" for name in peers]
    lines += report.table_head(" | ".join(["requests", *columns, "share of the limit of decodes"]))
    for case in result["cases"]:
        rounds, count = case["rounds"], case["requests"]
        rates = [count * tokens / statistics.median(each[name] for each in rounds) for name in (OURS, *peers)]
        ratios = [statistics.median(each[name] / each[OURS] for each in rounds) for name in peers]
        share = statistics.median(tokens * each["limit"] / each[OURS] for each in rounds)
        cells = [str(count), *(f"{rate:.1f}" for rate in rates), *(f"{ratio:.2f}" for ratio in ratios), f"{share:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing, running = commands.add_parser("write"), commands.add_parser("run")
    for command in (writing, running):
        command.add_argument("model", type=Path)
    writing.add_argument("--shape", choices=SHAPES, default="OLMoE-1B-7B")
    running.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    running.add_argument("--quantization", help="of a checkpoint in bfloat16, while Quire loads it")
    running.add_argument("--requests", type=lambda text: [*map(int, text.split(","))], default=[1, 8, 32])
    running.add_argument("--rounds", type=int, default=5)
    running.add_argument("--input", type=int, default=8)
    running.add_argument("--tokens", type=int, default=32)
    report.add_save(running)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write = write_gguf if arguments.model.suffix == ".gguf" else write_folder
        write(arguments.model, SHAPES[arguments.shape])
        return
    result = report.environment("python", "benchmarks/experts.py") | {
        **{name: getattr(arguments, name) for name in ("quantization", "rounds", "input", "tokens")},
        "model": arguments.model.name,
        **run(arguments),
    }
    report.publish(__file__, arguments.save, "experts", result, markdown(result))


if __name__ == "__main__":
    main()
