"""Decodes of a model with experts beside other engines, on the same file.

    python benchmarks/experts.py write MODEL.gguf [--shape OLMoE-1B-7B]
    python benchmarks/experts.py run MODEL.gguf --peer llama.cpp "python benchmarks/peers/speculating.py
                        llama-cpp-python {model} --requests 32" [--requests 1,8,32] [--rounds 5] [--save HARDWARE]

`write` makes a model in Q4_0 with random blocks: its routers choose experts uniformly, which is the worst case for a
batch. Its tokenizer is the demo model's, and its text says nothing. `run` takes engines in turns, in one run: each
request is a prompt of `--input` random tokens and `--tokens` greedy tokens. --peer adds an engine, as a command that
speaks the protocol of benchmarks/peers/speculating.py; {model} stands for the file. OpenVINO and vLLM do not read GGUF
files of these models: their commands name a folder with the model in their own form, and the ratios say so little.

The limit of a step is the bytes that it reads, over the bandwidth measured between rounds: all weights but experts,
and the distinct experts that this number of rows hits if all are equally likely.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from peers.process import Peer

import quire.demo
from quire import LLM, SamplingParams
from quire.kernels import cpu
from quire.layer_spec import distinct_experts
from quire.measure import report
from quire.model_config import ModelConfig, load_model_config

OURS = "Quire"
Q4_0 = gguf.GGMLQuantizationType.Q4_0
DEVIATION = 0.02  # of the weights


@dataclass(frozen=True)
class Shape:
    """Of an OLMoE: E experts, S of them active; D hidden, I inner; V tokens, heads of 128 elements."""

    num_layers: int
    E: int
    S: int
    D: int
    I: int  # noqa: E741
    V: int


SHAPES = {
    "OLMoE-1B-7B": Shape(16, 64, 8, 2048, 1024, 50_304),
    "OLMoE-8-layers": Shape(8, 64, 8, 2048, 1024, 50_304),
    "tiny": Shape(2, 8, 2, 256, 64, 8192),
}


def write(path: Path, shape: Shape) -> None:
    """A whole model."""
    writer, generator, D = gguf.GGUFWriter(path, "olmoe"), np.random.default_rng(0), shape.D
    writer.add_context_length(4096)
    writer.add_embedding_length(D)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.I)
    writer.add_head_count(D // 128)
    writer.add_head_count_kv(D // 128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(shape.E)
    writer.add_expert_used_count(shape.S)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    add_tokenizer(writer, shape.V)

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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """The demo model's, with tokens that no text has."""
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

    def __init__(self, model: Path, num_requests: int) -> None:
        self._llm = LLM(str(model), max_model_len=1024, max_num_seqs=num_requests, enable_prefix_caching=False)

    def seconds(self, prompts: list[list[int]], num_tokens: int) -> float:
        """From the prompts to the last token of all."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started


def step_limit(config: ModelConfig, num_rows: int, bandwidth: float) -> float:
    """Seconds of a decode step that does nothing but read."""
    num_bytes = float(config.read_bytes_per_step("bfloat16"))
    for part, of_expert in config.expert_bytes("bfloat16"):
        num_bytes += of_expert * (distinct_experts(part.num_experts, part.num_active, num_rows) - part.num_active)
    return num_bytes / bandwidth


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds of every number of requests, with every engine in turns."""
    config = load_model_config(arguments.model)
    engines: dict[str, Ours | Peer] = {OURS: Ours(arguments.model, max(arguments.requests))}
    engines |= {name: Peer(command.replace("{model}", str(arguments.model))) for name, command in arguments.peer}
    generator, cases = random.Random(0), []
    for requests in arguments.requests:
        rounds: list[dict[str, float]] = []
        for number in range(-1, arguments.rounds):  # the first one warms up
            prompts = [[generator.randrange(10, 4000) for _ in range(arguments.input)] for _ in range(requests)]
            found = {"limit": step_limit(config, requests, cpu.read_bandwidth(256 << 20, repeats=2))}
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
    """Medians over rounds. A ratio is the median of the rounds' ratios."""
    peers, tokens = result["peers"], result["tokens"]
    lines = report.heading("Experts beside other engines", result)
    lines += [f"- {result['model']}; {tokens} tokens after {result['input']}; {result['rounds']} rounds in turns.", ""]
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
    running.add_argument("--requests", type=lambda text: [*map(int, text.split(","))], default=[1, 8, 32])
    running.add_argument("--rounds", type=int, default=5)
    running.add_argument("--input", type=int, default=8)
    running.add_argument("--tokens", type=int, default=32)
    running.add_argument("--save", metavar="HARDWARE", help="writes benchmarks/results/HARDWARE/experts_DATE")
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.model, SHAPES[arguments.shape])
        return
    result = report.environment("python", "benchmarks/experts.py") | {
        **{name: getattr(arguments, name) for name in ("rounds", "input", "tokens")},
        "model": arguments.model.name,
        **run(arguments),
    }
    print(markdown(result))
    if arguments.save:
        report.save_published(Path(__file__).parent, "experts", arguments.save, result, markdown(result))


if __name__ == "__main__":
    main()
