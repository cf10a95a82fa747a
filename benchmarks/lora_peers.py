"""Requests with different adapters beside other engines: the same requests, each with its own adapter, and without.

Every round takes turns over the engines, each of them on one engine that serves adapters: first all requests on the
base model, then each with another adapter of rank 16 on all linear layers. A time covers all requests from the first
prompt to the last token; decoding is greedy. Readings: tokens per second; for each other engine Quire's over its, on
the base model and with adapters; and what adapters leave of an engine's own rate.

    python benchmarks/lora_peers.py MODEL ADAPTERS [--write] [--rank 16] [--requests 8] [--prompt-tokens 32]
                                    [--tokens 64] [--rounds 3] [--peer NAME COMMAND] [--save HARDWARE]

MODEL: a folder with weights of the measured shape. ADAPTERS: a folder of adapters with random numbers, one for each
request; --write makes it and ends. --peer adds another engine, as a command that speaks the protocol of
benchmarks/peers/adapting.py. --save writes benchmarks/results/HARDWARE/lora_peers_DATE.md and .json.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

from lora import write_adapter
from peers.process import Peer

from quire import LLM, SamplingParams, TokensPrompt
from quire.lora.request import LoRARequest
from quire.measure import report
from quire.model_config import load_model_config

OURS, BASE, ADAPTED = "Quire", "base model", "different adapters"
CONTEXT = 1024  # the most tokens of a request
TOP_TOKEN = 4000
WANTED = {"llama.cpp": 4.0}  # the ratio of rates with adapters that is wanted


class Ours:
    """Quire, which answers the same questions as a peer."""

    def __init__(self, model: str, folders: list[Path], rank: int) -> None:
        self._llm = LLM(
            model,
            max_model_len=CONTEXT,
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=len(folders),
            max_lora_rank=rank,
        )
        self._requests = {
            folder.name: LoRARequest(folder.name, 1 + index, str(folder)) for index, folder in enumerate(folders)
        }

    def ask(self, question: dict[str, Any], key: str) -> float:
        """The seconds for the prompts of the question."""
        assert key == "seconds"
        params = SamplingParams(temperature=0, max_tokens=question["num_tokens"], ignore_eos=True)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in question["prompts"]]
        adapters = [name and self._requests[name] for name in question["adapters"]]
        started = time.perf_counter()
        self._llm.generate(prompts, params, lora_request=adapters if any(adapters) else None, use_tqdm=False)
        return time.perf_counter() - started


def median_ratio(rounds: list[dict[str, dict[str, float]]], what: str, over: str) -> tuple[float, float, float]:
    """Quire's rate divided by another engine's: the median, the least and the largest ratio."""
    ratios = [each[OURS][what] / each[over][what] for each in rounds]
    return statistics.median(ratios), min(ratios), max(ratios)


def markdown(result: dict[str, Any]) -> str:
    rounds: list[dict[str, dict[str, float]]] = result["rounds"]
    lines = [
        *report.heading("Different adapters beside other engines", result),
        f"- {result['requests']} requests at once, each with {result['prompt_tokens']} tokens and {result['tokens']} "
        f"to be generated; as many adapters of rank {result['rank']} on all linear layers. {len(rounds)} rounds in "
        "turns, medians (least, most). Every engine serves adapters also while the base model answers.",
        "",
        *report.table_head("engine | base model, tokens/s | with adapters, tokens/s | with adapters / base model"),
    ]
    for name in rounds[0]:
        base, adapted = (statistics.median(each[name][what] for each in rounds) for what in (BASE, ADAPTED))
        shares = [each[name][ADAPTED] / each[name][BASE] for each in rounds]
        lines.append(
            f"| {name} | {base:.1f} | {adapted:.1f} | "
            f"{statistics.median(shares):.3f} ({min(shares):.3f}, {max(shares):.3f}) |"
        )
    if len(rounds[0]) > 1:
        lines += ["", *report.table_head("Quire over | base model | with adapters | wanted with adapters")]
    for name in rounds[0]:
        if name == OURS:
            continue
        cells = [
            f"{median:.2f} ({least:.2f}, {most:.2f})"
            for median, least, most in (median_ratio(rounds, what, name) for what in (BASE, ADAPTED))
        ]
        wanted = f"{WANTED[name]:g}" if name in WANTED else "the ratio on the base model"
        lines.append(f"| {name} | {' | '.join(cells)} | {wanted} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("adapters", type=Path)
    parser.add_argument("--write", action="store_true", help="write the adapters and end")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    arguments = parser.parse_args()
    environment = report.environment("python", "benchmarks/lora_peers.py")
    names = [f"adapter-{index:02}" for index in range(arguments.requests)]
    folders = [arguments.adapters / name for name in names]
    if arguments.write:
        arguments.adapters.mkdir(parents=True)
        model = load_model_config(Path(arguments.model))
        for seed, folder in enumerate(folders):
            write_adapter(folder, model, arguments.rank, seed)
        return
    engines: dict[str, Ours | Peer] = {OURS: Ours(arguments.model, folders, arguments.rank)}
    engines |= {name: Peer(command) for name, command in arguments.peer}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(1 + arguments.rounds):  # the first one warms up
        draw = random.Random(number)
        prompts = [draw.choices(range(10, TOP_TOKEN), k=arguments.prompt_tokens) for _ in names]
        found: dict[str, dict[str, float]] = {}
        for name in engines if number % 2 else reversed(engines):
            found[name] = {}
            for what, adapters in ((BASE, [None] * len(names)), (ADAPTED, names)):
                question = {"prompts": prompts, "adapters": adapters, "num_tokens": arguments.tokens}
                seconds = engines[name].ask(question, "seconds")
                found[name][what] = len(names) * arguments.tokens / seconds
        rounds.append({name: found[name] for name in engines})
    for engine in engines.values():
        if isinstance(engine, Peer):
            engine.close()
    options = ("rank", "requests", "prompt_tokens", "tokens")
    result = {**environment, **{name: getattr(arguments, name) for name in options}, "rounds": rounds[1:]}
    report.publish(__file__, arguments.save, "lora_peers", result, markdown(result))


if __name__ == "__main__":
    main()
