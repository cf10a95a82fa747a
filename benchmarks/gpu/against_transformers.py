"""An offline workload, compared with transformers' continuous batching on one GPU in one run: 256 x (1024 -> 128)
tokens.

    python benchmarks/gpu/against_transformers.py [--models Llama-3.1-8B,Qwen3-0.6B] [--rounds 3] [--save HARDWARE]

Both sides have the same random token ids and random weights in bfloat16, and generate greedily to the full length. Each
side runs in its own process and has the whole GPU. The sides take turns, and each round reverses the order. A process
starts, answers a few requests to warm up, and is timed from the first request to the last token. The result is the
median of the rounds.

transformers chooses attention, graphs and memory as its generate_batch does. --transformers '{"use_cuda_graph": true}'
gives other values to its ContinuousBatchingConfig. The result names the settings of the run. `--device cpu --models
tiny --transformers '{"num_blocks": 64}'` tries the script.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import machine
import torch
from engine import SHAPES, WORKLOAD, Engine, percent_of_limit, write_config
from kernels import limits

from quire.measure import report
from quire.measure.floor import Machine
from quire.model_config import load_model_config

SIDES = ("quire", "transformers")
GOAL = 5.0  # times transformers' rate
WARM_UP = (8, 8)  # requests, and output tokens of each


@dataclass(frozen=True)
class Task:
    """The task of a process.

    Args:
        side: one of SIDES; or `limits`, to measure the rates of the GPU.
        settings: values for transformers' ContinuousBatchingConfig.
    """

    side: str
    model: str
    device: str
    num_requests: int
    num_prompt: int
    num_output: int
    settings: dict[str, Any]

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The same prompts in every process."""
        draw = random.Random(0)
        return [draw.choices(range(vocab_size), k=self.num_prompt) for _ in range(self.num_requests)]


def run_quire(task: Task) -> dict[str, Any]:
    """The seconds of the workload with Quire, and the settings of the run."""
    with TemporaryDirectory() as folder:
        engine = Engine(write_config(Path(folder), task.model), task.device)

    def generate(prompts: Sequence[list[int]], num_output: int) -> None:
        before = engine.num_output_tokens
        for prompt in prompts:
            engine.add_prompt(prompt, num_output)
        for _ in engine.steps():
            pass
        assert engine.num_output_tokens - before == len(prompts) * num_output, "tokens are missing"

    chosen = {key: engine.resolved.settings[key].value for key in ("attention_backend", "async_scheduling")}
    return {"seconds": timed(task, engine.model.vocab_size, generate), "settings": chosen}


def run_transformers(task: Task) -> dict[str, Any]:
    """The same with transformers' manager. generate_batch would make a new manager and new graphs for each call."""
    import transformers
    from transformers.generation.continuous_batching.utils import WorkloadHints

    with TemporaryDirectory() as folder:
        config = transformers.AutoConfig.from_pretrained(write_config(Path(folder), task.model))
    with torch.device(task.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    options = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    hints = WorkloadHints(task.num_prompt, task.num_output, task.num_requests)
    with model.continuous_batching_context_manager(
        options,
        continuous_batching_config=transformers.ContinuousBatchingConfig(**task.settings),
        workload_hints=hints,
        warmup=task.device == "cuda",
    ) as manager:

        def generate(prompts: Sequence[list[int]], num_output: int) -> None:
            waiting = set(manager.add_requests(inputs=prompts, max_new_tokens=num_output))
            while waiting:
                output = manager.get_result(timeout=1)
                if output is None:
                    assert manager.is_running(), "transformers' generation has ended before its requests"
                elif output.is_finished():
                    assert output.error is None, output.error
                    assert len(output.generated_tokens) == num_output, "tokens are missing"
                    waiting.remove(output.request_id)

        seconds = timed(task, config.vocab_size, generate)
        settled = manager.continuous_batching_config
        chosen = {name: getattr(settled, name) for name in ("use_cuda_graph", "use_async_batching", "max_batch_tokens")}
    attention = {"attention": model.config._attn_implementation, "transformers": transformers.__version__}
    return {"seconds": seconds, "settings": {**chosen, **attention}}


def timed(task: Task, vocab_size: int, generate: Callable[[Sequence[list[int]], int], None]) -> float:
    """The seconds of the whole workload, after a small workload that warms up."""
    prompts = task.prompts(vocab_size)
    count, num_output = WARM_UP
    generate(prompts[:count], min(num_output, task.num_output))
    started = time.perf_counter()
    generate(prompts, task.num_output)
    return time.perf_counter() - started


def measured_limits(task: Task) -> dict[str, Any]:
    return asdict(limits())


RUN: dict[str, Callable[[Task], dict[str, Any]]] = {
    "quire": run_quire,
    "transformers": run_transformers,
    "limits": measured_limits,
}


def in_a_process(task: Task) -> dict[str, Any]:
    """The answer of the task's function. Raises RuntimeError if the process fails."""
    command = [sys.executable, __file__, "--task", json.dumps(asdict(task))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{task.side} failed on {task.model}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # libraries may print lines before the answer
    return found


def compare(tasks: dict[str, Task], num_rounds: int, run: Callable[[Task], dict[str, Any]]) -> dict[str, Any]:
    """Run the rounds. The ratio of output tokens per second is the median of the rounds' ratios."""
    rounds = []
    settings = {}
    for index in range(num_rounds):
        seconds = {}
        for side in SIDES if index % 2 == 0 else SIDES[::-1]:
            found = run(tasks[side])
            seconds[side], settings[side] = found["seconds"], found["settings"]
        rounds.append(seconds)
        print(", ".join(f"{side} {seconds[side]:.2f} s" for side in SIDES), flush=True)
    task = tasks[SIDES[0]]
    tokens = task.num_requests * task.num_output
    return {
        "model": task.model,
        "requests": task.num_requests,
        "prompt_tokens": task.num_prompt,
        "output_tokens": task.num_output,
        "rounds_seconds": rounds,
        "seconds": {side: statistics.median(each[side] for each in rounds) for side in SIDES},
        "output_tokens_per_s": {side: tokens / statistics.median(each[side] for each in rounds) for side in SIDES},
        "ratio": statistics.median(each["transformers"] / each["quire"] for each in rounds),
        "settings": settings,
    }


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """Markdown of one model."""
    sizes = f"{result['requests']} requests of {result['prompt_tokens']} -> {result['output_tokens']} tokens"
    yield from ("", f"## {result['model']}", "", f"{sizes}; medians of {len(result['rounds_seconds'])} rounds.", "")
    yield from ("| | s | output tokens/s | % of the limit | settings |", "|---|---|---|---|---|")
    for side in SIDES:
        percent = f"{result['percent_of_limit'][side]:.0f}" if "percent_of_limit" in result else ""
        settings = ", ".join(f"{name} {value}" for name, value in result["settings"][side].items())
        rate = result["output_tokens_per_s"][side]
        yield f"| {side} | {result['seconds'][side]:.2f} | {rate:,.0f} | {percent} | {settings} |"
    goal = ""
    if "percent_of_limit" in result:
        goal = f" (goal {GOAL:.0f}x: {'reached' if result['ratio'] >= GOAL else 'missed'})"
    yield from ("", f"Quire over transformers' continuous batching: {result['ratio']:.2f}x{goal}.")


def main(run: Callable[[Task], dict[str, Any]] = in_a_process) -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--models", default="Llama-3.1-8B,Qwen3-0.6B", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    for name, number in zip(("requests", "prompt-tokens", "output-tokens"), WORKLOAD, strict=True):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transformers", type=json.loads, default={}, metavar="JSON", help="its settings")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task = Task(**json.loads(arguments.task))
        print(json.dumps(RUN[task.side](task)))
        return
    if find_spec("transformers") is None:
        print("transformers is not installed, so its continuous batching is not compared")
        return
    if arguments.device == "cuda":
        machine.require()

    def task_of(side: str, model: str) -> Task:
        sizes = (arguments.requests, arguments.prompt_tokens, arguments.output_tokens)
        return Task(side, model, arguments.device, *sizes, arguments.transformers)

    limit = Machine(**run(task_of("limits", ""))) if arguments.device == "cuda" else None
    environment = machine.environment("against_transformers.py")
    text = ["# Offline against transformers' continuous batching", "", *machine.lines(environment)]
    if limit is not None:
        text.append(machine.limits_line(limit.read_bandwidth, limit.peak_flops))
    print("\n".join(text), flush=True)
    results = []
    for name in arguments.models.split(","):
        result = compare({side: task_of(side, name) for side in SIDES}, arguments.rounds, run)
        if limit is not None:
            result["percent_of_limit"] = percents(result, limit)
        results.append(result)
        lines = list(lines_of(result))
        text += lines
        print("\n".join(lines), flush=True)
    if arguments.save:
        saved = {**environment, **({} if limit is None else asdict(limit)), "models": results}
        report.save_published(__file__, "gpu_against_transformers", arguments.save, saved, "\n".join(text) + "\n")


def percents(result: dict[str, Any], limit: Machine) -> dict[str, float]:
    """For each side, the least time that the workload's bytes and operations take on this GPU, as a percentage of its
    time.
    """
    with TemporaryDirectory() as folder:
        model = load_model_config(write_config(Path(folder), result["model"]))
    sizes = (result["requests"], result["prompt_tokens"], result["output_tokens"])
    return {side: percent_of_limit(model, *sizes, result["seconds"][side], limit) for side in SIDES}


if __name__ == "__main__":
    main()
