"""The wait of a short prompt beside prompts of 2,000 tokens, and the cost of shared steps for the long prompts.

The engine process has random weights of a Llama of 64 million parameters. Users send prompts of 2,000 tokens in a
closed loop until a fixed number is done. Beside them a prompt of 32 tokens comes every half second. Rounds go through
the values of --max-shared-prefill-tokens in turns, on one engine. Before each round, short prompts run alone.

    python benchmarks/short_beside_long.py [--users 2] [--long 2] [--rounds 3] [--shared 0 64 128] [--save HARDWARE]

With 0 prompts go in order, each with the whole budget of a step. --save writes
benchmarks/results/HARDWARE/short_beside_long_DATE.md and .json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import AsyncLLM, SamplingParams, TokensPrompt
from quire.measure import report
from quire.messages import SetLimits

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
LONG_INPUT, LONG_OUTPUT, SHORT_INPUT, SHORT_OUTPUT = 2000, 16, 32, 8
SHORT_INTERVAL = 0.5  # seconds between two short requests; they do not wait for answers
NUM_ALONE = 5  # short requests before each round


@dataclass
class Times:
    """Times of the users in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # the times between tokens
    num_tokens: int = 0  # the tokens of prompts and outputs of finished requests


class Bench:
    """The users of one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._draw = random.Random(0)
        self._num_sent = 0

    async def request(self, num_input: int, num_output: int, times: Times) -> None:
        """Send one request whose prompt is not in the prefix cache."""
        self._num_sent += 1
        prompt = TokensPrompt(prompt_token_ids=self._draw.choices(range(10, 30000), k=num_input))
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        last, count = time.perf_counter(), 0
        async for output in self._llm.generate(prompt, params, f"r{self._num_sent}"):
            now = time.perf_counter()
            (times.gaps if count else times.first).append(now - last)
            last, count = now, len(output.outputs[0].token_ids)
        assert count == num_output
        times.num_tokens += num_input + num_output

    async def round(self, num_users: int, num_long: int) -> dict[str, Any]:
        """Measure short prompts alone, and then beside long prompts."""
        alone, long, short = Times(), Times(), Times()
        for _ in range(NUM_ALONE):
            await self.request(SHORT_INPUT, SHORT_OUTPUT, alone)
        start, left = time.perf_counter(), num_long

        async def user() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self.request(LONG_INPUT, LONG_OUTPUT, long)

        async def short_users() -> None:
            async with asyncio.TaskGroup() as tasks:
                while left > 0 or len(long.gaps) < num_long * (LONG_OUTPUT - 1):
                    tasks.create_task(self.request(SHORT_INPUT, SHORT_OUTPUT, short))
                    await asyncio.sleep(SHORT_INTERVAL)

        beside = asyncio.create_task(short_users())
        await asyncio.gather(*(user() for _ in range(num_users)))
        await beside
        seconds = time.perf_counter() - start
        return {
            "alone_ttft": alone.first,
            "short_ttft": short.first,
            "short_itl": short.gaps,
            "long_ttft": long.first,
            "long_itl": long.gaps,
            "tokens_per_second": (long.num_tokens + short.num_tokens) / seconds,
        }


async def run(folder: Path, arguments: argparse.Namespace) -> dict[int, list[dict[str, Any]]]:
    llm = AsyncLLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2 * LONG_INPUT,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
    )
    await llm.wait_ready()
    bench = Bench(llm)
    await bench.round(1, 1)  # pages, recordings
    rounds: dict[int, list[dict[str, Any]]] = {shared: [] for shared in arguments.shared}
    for _ in range(arguments.rounds):
        for shared in arguments.shared:
            await llm.set_limits(SetLimits(max_shared_prefill_tokens=shared))
            found = await bench.round(arguments.users, arguments.long)
            rounds[shared].append(found)
            print(f"{shared}: {', '.join(f'{name} {value:.3f}' for name, value in summary(found).items())}", flush=True)
    await llm.shutdown()
    return rounds


def summary(found: dict[str, Any]) -> dict[str, float]:
    """The figures of one round. Times are in seconds."""
    alone, beside = statistics.median(found["alone_ttft"]), statistics.median(found["short_ttft"])
    return {
        "alone": alone,
        "beside": beside,
        "ratio": beside / alone,
        "worst": max(found["short_ttft"]),
        "itl": statistics.median(found["short_itl"]),
        "long": statistics.median(found["long_ttft"]),
        "tokens": found["tokens_per_second"],
    }


def markdown(result: dict[str, Any]) -> str:
    """The text of the result file."""
    lines = [
        *report.heading("A short prompt beside long ones", result),
        f"- Random weights of a Llama of 64 million parameters, bfloat16. {result['users']} users in a closed loop",
        f"  with {LONG_INPUT} tokens in, {LONG_OUTPUT} out, {result['long']} requests a round; beside them a request",
        f"  with {SHORT_INPUT} in, {SHORT_OUTPUT} out every {SHORT_INTERVAL:g} s. Rounds in turns on one engine; "
        f"medians of {len(next(iter(result['rounds'].values())))} rounds, ratios within a round.",
        "- Tokens/s: prompts and outputs of all, over the row of 0 of the same round.",
        "",
        "| --max-shared-prefill-tokens | short alone, p50 TTFT ms | beside, p50 | ratio | worst | short ITL ms, p50 "
        "| long p50 TTFT s | tokens/s | over 0 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    in_order = result["rounds"].get("0", [])
    for shared, rounds in result["rounds"].items():
        found = [summary(each) for each in rounds]
        middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
        pairs = zip(rounds, in_order, strict=False)
        over = [each["tokens_per_second"] / base["tokens_per_second"] for each, base in pairs]
        lines.append(
            f"| {shared} | {1e3 * middle['alone']:.0f} | {1e3 * middle['beside']:.0f} | {middle['ratio']:.1f} "
            f"| {1e3 * middle['worst']:.0f} | {1e3 * middle['itl']:.0f} | {middle['long']:.1f} "
            f"| {middle['tokens']:.0f} | {f'{statistics.median(over):.2f}' if over else ''} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--long", type=int, default=2, help="long requests of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", type=int, nargs="+", default=[0, 64, 128])
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/short_beside_long.py")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        rounds = asyncio.run(run(Path(folder), arguments))
    result = {
        **environment,
        "users": arguments.users,
        "long": arguments.long,
        "rounds": {str(shared): found for shared, found in rounds.items()},
    }
    report.publish(__file__, arguments.save, "short_beside_long", result, markdown(result))


if __name__ == "__main__":
    main()
