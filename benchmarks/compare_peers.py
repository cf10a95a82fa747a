"""A dense model beside other engines, in several forms of its weights.

    python benchmarks/compare_peers.py MODEL --form bfloat16 none --form int8 int8
        --peer bfloat16 llama.cpp "python benchmarks/peers/speculating.py llama-cpp-python BF16.gguf --requests 32"
        [--cases 1x8x32,8x8x32] [--rounds 3] [--ranks 2] [--what avx2] [--save HARDWARE]

A form has a name and the quantization with which Quire loads MODEL (`none`: as it is stored); `--kv FORM DTYPE` gives a
form another dtype of the KV cache. `--peer FORM NAME COMMAND` adds an engine to a form; the command speaks the protocol
of benchmarks/peers/speculating.py. The engines of a form are alive at the same time and take turns, and all but one are
stopped. The forms follow each other. A case is PROMPTSxINPUTxOUTPUT: the number of prompts, the random tokens of each,
and the greedy tokens after it. The first round of each case is not counted, because an engine may prepare things at the
first prompts of a size; with --count-first it is, for cases that last minutes. Tokens per second count prompts and
answers. A ratio is the median of the ratios of the rounds.

--ranks N: Quire is N processes that share the model (-tp N), with a thread each; a peer gets its own options.

To hold engines to AVX2, set QUIRE_ISA=avx2 and ONEDNN_MAX_CPU_ISA=AVX2, and compile llama.cpp for it. Whether the other
engine obeys is another question (benchmarks/NOTES.md: OpenVINO does not).

--on-enter waits for a line of the standard input before each round of a case, so that a machine can be shared: other
work runs in between. Round 0 is the one that is not counted. --save writes
benchmarks/results/HARDWARE/compare_peers_WHAT_DATE.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from typing import Any

from peers.process import Peer

from quire import LLM, SamplingParams
from quire.kernels import cpu
from quire.measure import report

OURS = "Quire"
CASES = "1x8x32,8x8x32,32x8x32,1x512x1,16x256x64"
LIMITS = ("QUIRE_ISA", "ONEDNN_MAX_CPU_ISA")  # of the environment, which the result file states
READ_BYTES = 256 << 20


class Ours:
    """Quire in this process."""

    def __init__(self, model: str, num_requests: int, num_tokens: int, num_ranks: int, **form: Any) -> None:
        self._llm = LLM(
            model,
            tensor_parallel_size=num_ranks,
            num_threads=1 if num_ranks > 1 else None,
            dtype="bfloat16",
            max_model_len=num_tokens,
            max_num_seqs=num_requests,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 30,
            **form,
        )

    def seconds(self, prompts: list[list[int]], num_tokens: int) -> float:
        """The seconds from the prompts to the last token of all requests."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started


def run_form(name: str, quantization: str | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every case with every engine of a form, in turns. The engines live from the first case to the last one."""
    cases = arguments.cases
    most, longest = max(case[0] for case in cases), max(case[1] + case[2] for case in cases)
    how = {"quantization": quantization, "kv_cache_dtype": dict(arguments.kv).get(name, "auto")}
    engines: dict[str, Ours | Peer] = {OURS: Ours(arguments.model, most, longest, arguments.ranks, **how)}
    engines |= {peer: Peer(command) for form, peer, command in arguments.peer if form == name}
    generator = random.Random(0)
    found = []
    for requests, input_length, output_length in cases:
        rounds: list[dict[str, float]] = []
        for number in range(1 if arguments.count_first else 0, arguments.rounds + 1):
            if arguments.on_enter:
                print(f"{name} {requests}x{input_length}x{output_length}, round {number}", flush=True)
                sys.stdin.readline()
            prompts = [[generator.randrange(10, 4000) for _ in range(input_length)] for _ in range(requests)]
            seconds = {"bandwidth": cpu.read_bandwidth(READ_BYTES, repeats=2)}
            for engine in engines if number % 2 == 0 else reversed(engines):
                worker = engines[engine]
                if isinstance(worker, Peer):
                    question = {"prompts": prompts, "num_tokens": output_length}
                    seconds[engine] = worker.ask(question, "seconds")
                else:
                    seconds[engine] = worker.seconds(prompts, output_length)
            if number > 0:
                rounds.append(seconds)
            if arguments.on_enter:
                print("done", flush=True)
        found.append({"case": [requests, input_length, output_length], "rounds": rounds})
    for worker in engines.values():
        if isinstance(worker, Peer):
            worker.close()
    del engines
    gc.collect()
    return {"form": name, **how, "cases": found}


def form_table(form: dict[str, Any]) -> list[str]:
    names = [name for name in form["cases"][0]["rounds"][0] if name != "bandwidth"]
    names.sort(key=lambda name: name != OURS)
    peers = names[1:]
    head = [f"{name}, tokens/s" for name in names] + [f"{OURS} / {peer}" for peer in peers] + ["memory, GB/s"]
    lines = ["", f"{form['form']}:", "", *report.table_head(" | ".join(["case", *head]))]
    for each in form["cases"]:
        requests, input_length, output_length = each["case"]
        rounds, tokens = each["rounds"], requests * (input_length + output_length)
        cells = [f"{requests}x{input_length}x{output_length}"]
        cells += [f"{tokens / statistics.median(times[name] for times in rounds):.1f}" for name in names]
        for peer in peers:
            ratios = sorted(times[peer] / times[OURS] for times in rounds)
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        cells.append(" ".join(f"{times['bandwidth'] / 1e9:.0f}" for times in rounds))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def markdown(result: dict[str, Any]) -> str:
    """The result file for people."""
    limits = ", ".join(f"{name}={value}" for name, value in result["limits"].items()) or "none"
    lines = report.heading("A dense model beside other engines", result)
    behind = "" if result["counts_first"] else " after one that is not counted"
    lines.append(f"- Engines in turns, {result['rounds']} rounds{behind}, all others stopped; limits: {limits}.")
    lines.append("- Tokens per second count the tokens of prompts and answers. Their times are medians over rounds.")
    lines.append("- A ratio is the median over rounds, with the least and the greatest in brackets.")
    for form in result["forms"]:
        lines += form_table(form)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--form", nargs=2, action="append", required=True, metavar=("NAME", "QUANTIZATION"))
    parser.add_argument("--peer", nargs=3, action="append", default=[], metavar=("FORM", "NAME", "COMMAND"))
    parser.add_argument("--kv", nargs=2, action="append", default=[], metavar=("FORM", "DTYPE"))
    parser.add_argument(
        "--cases", type=lambda text: [tuple(map(int, case.split("x"))) for case in text.split(",")], default=CASES
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="processes of Quire that share the model")
    parser.add_argument("--count-first", action="store_true", help="count the first round of each case too")
    parser.add_argument("--on-enter", action="store_true", help="wait for a line before each round of a case")
    parser.add_argument("--what", default="cpu", help="part of the name of result files")
    arguments = parser.parse_args()
    forms = {name: None if quantization == "none" else quantization for name, quantization in arguments.form}
    if unknown := {form for form, *_ in (*arguments.peer, *arguments.kv)} - forms.keys():
        parser.error(f"--peer or --kv of unknown forms {', '.join(sorted(unknown))}")
    result = report.environment("python", "benchmarks/compare_peers.py") | {
        "rounds": arguments.rounds,
        "counts_first": arguments.count_first,
        "limits": {name: os.environ[name] for name in LIMITS if name in os.environ},
        "forms": [run_form(name, quantization, arguments) for name, quantization in forms.items()],
    }
    report.publish(__file__, arguments.save, f"compare_peers_{arguments.what}", result, markdown(result))


if __name__ == "__main__":
    main()
