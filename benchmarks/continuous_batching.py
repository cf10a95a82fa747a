"""Continuous batching against transformers' generate(), one request at a time and in a static batch of 16.

Requests have prompts of 16 to 128 tokens. Their numbers of output tokens come from an exponential distribution, like
real ones. A static batch is padded on the left and runs until its longest request has ended; only tokens that a request
asked for count. The three run in turns in this process, on the same weights, with one thread per core.

    python benchmarks/continuous_batching.py [MODEL] [--requests 32] [--alone 4] [--rounds 3] [--save HARDWARE]

MODEL: a folder with weights; the default is the bundled demo model. --alone: the number of requests that are sent one
at a time, which takes longest; the rate is measured over these. --save writes
benchmarks/results/HARDWARE/continuous_batching_DATE.md and .json.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import quire.demo
from quire import LLM, SamplingParams, TokensPrompt
from quire.measure import report

STATIC_BATCH = 16
MIN_INPUT, MAX_INPUT, MIN_OUTPUT, MAX_OUTPUT = 16, 128, 4, 160
WAYS = ("quire", "static batch of 16", "one at a time")


@dataclass(frozen=True)
class Request:
    token_ids: list[int]
    num_output: int


def make_requests(count: int, mean_output: float, seed: int) -> list[Request]:
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        token_ids = draw.choices(range(10, 4000), k=draw.randint(MIN_INPUT, MAX_INPUT))
        num_output = round(draw.expovariate(1 / mean_output))
        requests.append(Request(token_ids, min(max(num_output, MIN_OUTPUT), MAX_OUTPUT)))
    return requests


def run_transformers(model: Any, requests: list[Request], batch: int) -> float:
    """The seconds for all requests, `batch` of them at a time."""
    started = time.perf_counter()
    for first in range(0, len(requests), batch):
        chosen = requests[first : first + batch]
        width = max(len(request.token_ids) for request in chosen)
        rows = [[0] * (width - len(request.token_ids)) + request.token_ids for request in chosen]
        mask = [[0] * (width - len(request.token_ids)) + [1] * len(request.token_ids) for request in chosen]
        longest = max(request.num_output for request in chosen)
        output = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
        assert output.shape == (len(chosen), width + longest)
    return time.perf_counter() - started


def run_quire(llm: LLM, requests: list[Request]) -> float:
    """The seconds for all requests, which are sent at once."""
    params = [SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True) for request in requests]
    started = time.perf_counter()
    outputs = llm.generate([TokensPrompt(prompt_token_ids=each.token_ids) for each in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert [len(output.outputs[0].token_ids) for output in outputs] == [request.num_output for request in requests]
    return seconds


def markdown(result: dict[str, Any]) -> str:
    rounds = result["output_tokens_per_second"]
    lines = [
        *report.heading("Continuous batching against transformers", result),
        f"- {result['requests']} requests, {MIN_INPUT} to {MAX_INPUT} tokens in, {result['mean_output']:g} out on",
        f"  average (exponential, {MIN_OUTPUT} to {MAX_OUTPUT}); bfloat16; transformers {result['transformers']}.",
        f"- One at a time: the first {result['alone']} of them. In turns; medians of {len(rounds)} rounds.",
        "",
        "| | output tokens/s | Quire over it |",
        "|---|---|---|",
    ]
    for way in WAYS:
        rate = statistics.median(each[way] for each in rounds)
        ratio = statistics.median(each["quire"] / each[way] for each in rounds)
        lines.append(f"| {way} | {rate:.1f} | {'' if way == 'quire' else f'{ratio:.1f}x'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model", nargs="?", default=str(quire.demo.path("target")))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--mean-output", type=float, default=48.0)
    parser.add_argument("--alone", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/continuous_batching.py")
    llm = LLM(
        arguments.model,
        max_model_len=MAX_INPUT + MAX_OUTPUT,
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    torch.set_num_threads(llm.resolved.device.num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    warm_up = make_requests(1, MIN_OUTPUT, 0)
    run_transformers(model, warm_up, 1)
    run_quire(llm, warm_up)
    rounds = []
    for seed in range(arguments.rounds):
        requests = make_requests(arguments.requests, arguments.mean_output, seed)
        alone = requests[: arguments.alone]
        tokens, tokens_alone = (sum(request.num_output for request in some) for some in (requests, alone))
        rounds.append(
            {
                "quire": tokens / run_quire(llm, requests),
                "static batch of 16": tokens / run_transformers(model, requests, STATIC_BATCH),
                "one at a time": tokens_alone / run_transformers(model, alone, 1),
            }
        )
        print(", ".join(f"{way}: {rate:.1f} tokens/s" for way, rate in rounds[-1].items()), flush=True)
    result = {
        **environment,
        "transformers": transformers.__version__,
        "requests": arguments.requests,
        "mean_output": arguments.mean_output,
        "alone": arguments.alone,
        "output_tokens_per_second": rounds,
    }
    report.publish(__file__, arguments.save, "continuous_batching", result, markdown(result))


if __name__ == "__main__":
    main()
