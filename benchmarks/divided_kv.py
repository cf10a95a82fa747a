"""Two ranks that divide the KV cache beside two ranks that both hold it: prompts, and decodes after a long context.

The model has random weights: few layers with the attention of a large one. Both engines take turns, and the result is
the median of the rounds' ratios. Ranks have one thread.

    python benchmarks/divided_kv.py one-head|latent [--tokens 8000] [--rounds 5] [--save HARDWARE]

--save writes benchmarks/results/HARDWARE/divided_kv_MODEL_DATE.md and .json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine, start_engine
from quire.measure import report
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams

COMMON = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "max_position_embeddings": 65_536,
    "num_attention_heads": 16,
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
}
MODELS: dict[str, dict[str, Any]] = {
    "one-head": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 128,
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
    },
    "latent": COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 2,
        "kv_lora_rank": 512,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
}
NUM_DECODES = 32


def start(folder: Path, num_owners: int, num_tokens: int) -> StartedEngine:
    config = EngineConfig.from_kwargs(
        device="cpu",
        load_format="dummy",
        tensor_parallel_size=2,
        decode_context_parallel_size=num_owners,
        num_threads=1,
        max_model_len=num_tokens + 2 * NUM_DECODES,
        max_num_seqs=1,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=200_000_000,
        enable_prefix_caching=False,
    )
    return start_engine(config, folder, is_server=False, progress=lambda phase, share, detail: None)


def measure(core: EngineCore, name: str, num_tokens: int) -> tuple[float, float]:
    """The seconds of a prompt, and of a decode step after it."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_DECODES + 1, ignore_eos=True)
    begin = time.perf_counter()
    core.add(AddRequest(name, [7 + at % 900 for at in range(num_tokens)], params, NUM_DECODES + 1))
    first = None
    while core.has_work():
        if any(delta.token_ids for delta in core.step()) and first is None:
            first = time.perf_counter()
    assert first is not None
    return first - begin, (time.perf_counter() - first) / NUM_DECODES


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[args.model]))
        engines = {"held twice": start(Path(folder), 1, args.tokens), "divided": start(Path(folder), 2, args.tokens)}
        for engine in engines.values():  # decode steps are recorded
            measure(engine.core, "first", 300)
        for number in range(args.rounds):
            found = {}
            for name in list(engines)[:: 1 if number % 2 else -1]:
                prompt, decode = measure(engines[name].core, f"r{number}", args.tokens)
                found[name] = {"prompt": prompt, "decode": decode}
            rounds.append(found)
        for engine in engines.values():
            engine.core.shutdown()
    result = {
        **report.environment("python", "benchmarks/divided_kv.py"),
        "rounds": rounds,
    }
    lines = [*report.heading(f"A KV cache that two ranks divide, {args.model}, {args.tokens:,} tokens", result)]
    for kind in ("prompt", "decode"):
        ratios = [each["divided"][kind] / each["held twice"][kind] for each in rounds]
        lines.append(
            f"- {kind}: **{statistics.median(ratios):.2f}** of the time where both ranks hold it "
            f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds in turns)"
        )
    lines += [
        "",
        *report.table_head("round | prompt, held twice, s | prompt, divided, s | decode, held twice, ms | divided, ms"),
    ]
    for number, each in enumerate(rounds, 1):
        one, two = each["held twice"], each["divided"]
        seconds, milliseconds = (one["prompt"], two["prompt"]), (1e3 * one["decode"], 1e3 * two["decode"])
        cells = [f"{value:.2f}" for value in (*seconds, *milliseconds)]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    report.publish(__file__, args.save, f"divided_kv_{args.model}", result, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
