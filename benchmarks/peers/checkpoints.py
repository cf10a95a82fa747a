"""A comparison of the weights that several engines read from the same quantized checkpoints.

Each engine runs in its own environment on the same token ids, and writes its results:

    python benchmarks/peers/checkpoints.py prompts PROMPTS.json                    # with Quire: chats of the demo model
    python benchmarks/peers/checkpoints.py read quire FOLDER PROMPTS.json OUT.json
    python benchmarks/peers/checkpoints.py read vllm FOLDER PROMPTS.json OUT.json
    python benchmarks/peers/checkpoints.py read transformers FOLDER PROMPTS.json OUT.json
    python benchmarks/peers/checkpoints.py compare NAME=A.json,B.json ...          # one line per pair

`read` computes in bfloat16 (with transformers in float32), or in `--dtype`. `compare` gives the difference of the log
probabilities of the prompts' tokens (mean of |A - B| in nats), and the number of prompts whose greedy continuations of
48 tokens are equal.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
from pathlib import Path
from typing import Any

NUM_PROMPTS, PROMPT_LENGTH, NUM_GREEDY = 32, 128, 48
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"enforce_eager": True, "enable_prefix_caching": False},
    "quire": {"kv_cache_memory_bytes": 1 << 28, "enable_prefix_caching": False},
}


def write_prompts(path: Path) -> None:
    import quire.demo
    from quire.demo.data import chats, clean_entries
    from quire.frontend.tokenizer import Tokenizer

    text = "".join(chats(clean_entries()[1::7], random.Random(1)))
    token_ids = Tokenizer.from_folder(quire.demo.path()).encode(text)
    starts = range(0, NUM_PROMPTS * PROMPT_LENGTH, PROMPT_LENGTH)
    path.write_text(json.dumps([token_ids[start : start + PROMPT_LENGTH] for start in starts]))


def read_with_llm(engine: str, folder: str, prompts: list[list[int]], dtype: str) -> dict[str, Any]:
    """The results of an engine with vLLM's offline API."""
    module = importlib.import_module(engine)
    llm = module.LLM(model=folder, dtype=dtype, max_model_len=512, seed=0, **OPTIONS[engine])
    params = module.SamplingParams(temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    logprobs = [
        [found[token].logprob for token, found in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return {"logprobs": logprobs, "greedy": [list(output.outputs[0].token_ids) for output in outputs]}


def read_with_transformers(folder: str, prompts: list[list[int]], dtype: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None  # the other engines continue after the end of the sequence
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits.float(), -1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        mask = torch.ones_like(ids)
        greedy = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_GREEDY)
    return {"logprobs": logprobs.tolist(), "greedy": greedy[:, ids.shape[1] :].tolist()}


def compare(first: Path, second: Path) -> dict[str, float]:
    a, b = (json.loads(path.read_text()) for path in (first, second))
    distances = sorted(
        abs(x - y) for xs, ys in zip(a["logprobs"], b["logprobs"], strict=True) for x, y in zip(xs, ys, strict=True)
    )
    return {
        "mean_distance": sum(distances) / len(distances),
        "p99_distance": distances[len(distances) * 99 // 100],
        "same_greedy": sum(x == y for x, y in zip(a["greedy"], b["greedy"], strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prompts").add_argument("out", type=Path)
    reading = commands.add_parser("read")
    reading.add_argument("engine", choices=("quire", "vllm", "transformers"))
    reading.add_argument("folder")
    reading.add_argument("prompts", type=Path)
    reading.add_argument("out", type=Path)
    reading.add_argument("--dtype")
    commands.add_parser("compare").add_argument("pairs", nargs="+", metavar="NAME=A.json,B.json")
    args = parser.parse_args()
    if args.command == "prompts":
        write_prompts(args.out)
    elif args.command == "read":
        prompts = json.loads(args.prompts.read_text())
        if args.engine == "transformers":
            found = read_with_transformers(args.folder, prompts, args.dtype or "float32")
        else:
            found = read_with_llm(args.engine, args.folder, prompts, args.dtype or "bfloat16")
        args.out.write_text(json.dumps(found))
    else:
        for pair in args.pairs:
            name, _, files = pair.partition("=")
            first, second = files.split(",")
            print(json.dumps({"name": name, **compare(Path(first), Path(second))}))


if __name__ == "__main__":
    main()
