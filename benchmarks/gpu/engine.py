"""The engine on a GPU, with random weights in the shapes of published models.

It measures decoding as a share of the memory's rate, prompts as a share of the rate of arithmetic, a whole workload,
and the start. It compares the gains of CUDA graphs, scheduling ahead, FP8, int4, FlashInfer (if it is installed) and
prefix caching with published gains of other engines. It also gives the cost of --deterministic, and the goals for an
H100.

    python benchmarks/gpu/engine.py [--models Llama-3.1-8B,Qwen3-0.6B] [--save HARDWARE]

Everything goes through EngineCore in this process, without server and tokenizer. Limits of the GPU are measured in the
same run. The time of a step begins when the step before it ends. In this time the GPU counts as busy only between the
marks at the beginning and the end of its work. `--device cpu --models tiny` tries the script.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import machine
import torch
from kernels import limits

from quire.config import EngineConfig
from quire.engine.start import StartedEngine, start_engine
from quire.measure import report
from quire.measure.floor import Machine, Work, floor
from quire.messages import AddRequest
from quire.model_config import ModelConfig
from quire.planning.flashinfer_facts import why_not_flashinfer
from quire.sampling_params import SamplingParams
from quire.schedule import StepRecord

# hidden, inner, layers, heads, KV heads, head dim, vocabulary
SHAPES = {
    "Llama-3.1-8B": ("Llama", (4096, 14336, 32, 32, 8, 128, 128256)),
    "Qwen3-8B": ("Qwen3", (4096, 12288, 36, 32, 8, 128, 151936)),
    "Qwen3-0.6B": ("Qwen3", (1024, 3072, 28, 16, 8, 128, 151936)),
    "tiny": ("Llama", (64, 128, 2, 4, 2, 16, 512)),
}
FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size"),
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCHES_OF_COMPARISONS = (1, 32, 256)
DECODE_STEPS, DECODE_PROMPT = 64, 128
PREFILL_TOKENS, PREFILL_REPEATS = 2048, 10
# Settings that are compared at some batch sizes, and published gains of other engines.
COMPARISONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "eager": ({"enforce_eager": True}, "Without CUDA graphs", "vLLM PR 25444, graphs of pieces -> whole: 1.43x"),
    "not ahead": ({"async_scheduling": False}, "Without scheduling ahead", "transformers, 8B at batch 32: 1.28x"),
    "fp8": (
        {"quantization": "fp8"},
        "FP8 weights",
        "vLLM 0.30, Qwen3-8B on an H100: 1.46x at batch 1, 1.34x at 32, 1.13x at 256",
    ),
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, "FP8 KV cache", "vLLM's guide: half the bytes, twice the tokens"),
    "int4": ({"quantization": "int4"}, "int4 weights", "SGLang, Qwen3-8B AWQ at batch 1: 2.29x"),
    "flashinfer": ({"attention_backend": "FLASHINFER"}, "FlashInfer's attention", "none found: which is faster?"),
}
SLOWER = ("eager", "not ahead")  # settings without a feature: the gain of the feature is the time that they lose
SHARED_PREFIX = 0.9  # the part of each prompt of a workload that all prompts have in common
PUBLISHED_PREFIX_GAIN = "runinfra.ai, 90 % hits: 2.7x"
WORKLOAD = (256, 1024, 128)  # requests, prompt tokens, output tokens
MIXED_TOKENS = (32, 64, 128, 256)  # the tokens of captured steps that are not only decodes
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
# Goals, for one H100 with an 8B model in bfloat16.
GOAL_MODEL = "Llama-3.1-8B"
GOAL_BYTES_PER_S, GOAL_PERCENT_OF_COPY, GOAL_FLOPS, GOAL_IDLE = 2.2e12, 80, 480e12, 0.03
GOAL_START_SECONDS, GOAL_PLAN_ERROR = 20, 0.03


def write_config(folder: Path, name: str) -> Path:
    """Write config.json of a model; random weights need no other file."""
    family, sizes = SHAPES[name]
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": name == "Qwen3-0.6B",
        **dict(zip(FIELDS, sizes, strict=True)),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Engine:
    """A started engine, and the seconds of its start by phase."""

    def __init__(self, folder: Path, device: str, **settings: Any) -> None:
        self._last_time = time.perf_counter()
        self.phases: dict[str, float] = {}
        config = EngineConfig.from_kwargs(
            device=device,
            load_format="dummy",
            dtype="bfloat16",
            max_num_seqs=256,
            **{"enable_prefix_caching": False} | settings,
        )
        self._started: StartedEngine = start_engine(config, folder, is_server=True, progress=self._note)
        self.core, self.model = self._started.core, self._started.model_config
        self.resolved = self._started.resolved
        self._num_added = 0
        self.num_output_tokens = 0

    def _note(self, phase: str, fraction: float, detail: str) -> None:
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last_time
        self._last_time = now

    def add(self, num_prompt: int, num_output: int, prefix: Sequence[int] = ()) -> None:
        ids = [*prefix, *torch.randint(0, self.model.vocab_size, (num_prompt - len(prefix),)).tolist()]
        self.add_prompt(ids, num_output)

    def add_prompt(self, token_ids: list[int], num_output: int) -> None:
        self._num_added += 1
        self.core.add(AddRequest(f"r{self._num_added}", token_ids, GREEDY, num_output))

    def steps(self) -> Iterator[StepRecord]:
        """The records of all steps until all requests have ended."""
        while self.core.has_work():
            for delta in self.core.step():
                if delta.error is not None:
                    raise RuntimeError(delta.error)
                self.num_output_tokens += len(delta.token_ids)
            if self.core.last_record is not None:
                yield self.core.last_record

    def kv_bytes(self, num_tokens: float) -> float:
        return (
            num_tokens
            * self.resolved.memory.kv_cache_bytes
            / (self.resolved.memory.num_blocks * self.resolved.model.block_size)
        )


def decode(engine: Engine, batch: int) -> dict[str, Any]:
    """The median decode step of this number of requests."""
    for _ in range(batch):
        engine.add(DECODE_PROMPT, DECODE_STEPS + 2 * batch)
    found = []
    for record in engine.steps():
        if record.num_decode_tokens == batch and record.num_prefill_tokens == 0:
            found.append(record)
        if len(found) > DECODE_STEPS:
            break
    engine.core.abort([f"r{engine._num_added - i}" for i in range(batch)])
    for _ in engine.steps():
        pass
    found = found[1:]  # the first one ends a prompt
    seconds = statistics.median(record.step_seconds for record in found)
    busy = statistics.median(record.forward_seconds + record.sample_seconds for record in found)
    kv_tokens = statistics.mean(record.num_kv_tokens_read for record in found)
    weights = engine.model.read_bytes_per_step("bfloat16", engine.resolved.model.quantization)
    num_bytes = weights + engine.kv_bytes(kv_tokens)
    return {
        "batch": batch,
        "step_ms": 1e3 * seconds,
        "tokens_per_s": batch / seconds,
        "bytes_per_s": num_bytes / seconds,
        "idle_share": max(0.0, 1 - busy / seconds),
    }


def prefill(engine: Engine) -> dict[str, Any]:
    """Measure prompts, one at a time: the median time, and the operations per second of layers and attention."""
    found = []
    for _ in range(PREFILL_REPEATS + 1):
        engine.add(PREFILL_TOKENS, 1)
        found.append(sum(record.step_seconds for record in engine.steps()))
    seconds = statistics.median(found[1:])
    model = engine.model
    attention = model.attention_flops() * PREFILL_TOKENS**2 // 2
    flops = 2 * model.num_block_parameters() * PREFILL_TOKENS + attention
    return {"tokens": PREFILL_TOKENS, "ms": 1e3 * seconds, "flop_per_s": flops / seconds}


def short_prompts(engine: Engine) -> dict[str, float]:
    """Median milliseconds of a step with a prompt of this number of tokens, one at a time."""
    found = {}
    for num_tokens in MIXED_TOKENS:
        seconds = []
        for _ in range(PREFILL_REPEATS + 1):
            engine.add(num_tokens, 1)
            seconds.append(sum(record.step_seconds for record in engine.steps()))
        found[str(num_tokens)] = 1e3 * statistics.median(seconds[1:])
    return found


def workload(engine: Engine, shared: float = 0.0) -> dict[str, Any]:
    """Measure many requests at once, all of full length. `shared` is the part of each prompt that all have in
    common.
    """
    count, num_prompt, num_output = WORKLOAD
    prefix = torch.randint(0, engine.model.vocab_size, (int(shared * num_prompt),)).tolist()
    if prefix:
        engine.add(num_prompt, 1, prefix)
        for _ in engine.steps():
            pass
    start = time.perf_counter()
    for _ in range(count):
        engine.add(num_prompt, num_output, prefix)
    records = list(engine.steps())
    seconds = time.perf_counter() - start
    busy = sum(record.forward_seconds + record.sample_seconds for record in records)
    return {
        "requests": count,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "seconds": seconds,
        "output_tokens_per_s": count * num_output / seconds,
        "idle_share": max(0.0, 1 - busy / seconds),
    }


def percent_of_limit(
    model: ModelConfig, count: int, num_prompt: int, num_output: int, seconds: float, limit: Machine
) -> float:
    """For a workload in bfloat16: the least time that its bytes and operations take, divided by the real time."""
    work = [Work(num_prompt, 0, num_output)] * count
    return float(floor(model, "bfloat16", work, limit).report(seconds, limit)["percent"])


def with_percentages(result: dict[str, Any], model: ModelConfig, limit: Machine) -> dict[str, Any]:
    """The result of a model with each rate as a percentage of the GPU's."""

    def of_copy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"percent_of_copy_rate": 100 * row["bytes_per_s"] / limit.read_bandwidth} for row in rows]

    def of_product(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"percent_of_product_rate": 100 * row["flop_per_s"] / limit.peak_flops}

    found = dict(result)
    found |= {key: of_copy(result[key]) for key in ("decode", *COMPARISONS) if key in result}
    found |= {key: of_product(result[key]) for key in ("prefill", "flashinfer_prefill") if key in result}
    done = result["workload"]
    sizes = (done["requests"], done["prompt_tokens"], done["output_tokens"])
    return found | {"workload": done | {"percent_of_limit": percent_of_limit(model, *sizes, done["seconds"], limit)}}


def run_model(name: str, device: str, limit: Machine | None) -> dict[str, Any]:
    """All measurements of one model. Each engine ends before the next one starts."""
    result: dict[str, Any] = {"model": name}
    with TemporaryDirectory() as folder:
        path = write_config(Path(folder), name)
        cuda_bytes = bytes_before(device)
        engine = Engine(path, device)
        result["start_seconds"] = engine.phases
        result["memory"] = {
            key: engine.resolved.settings[key].value for key in ("weight_bytes", "work_bytes", "num_blocks")
        }
        result["prefill"] = prefill(engine)
        result["decode"] = [decode(engine, batch) for batch in BATCHES]
        result["workload"] = workload(engine)
        result["short_prompts"] = {"captured": short_prompts(engine)}
        if device == "cuda":
            free, total = torch.cuda.mem_get_info()
            planned = [engine.resolved.settings[key].value for key in ("weight_bytes", "work_bytes", "kv_cache_bytes")]
            result["memory"] |= {"planned_bytes": sum(planned), "taken_bytes": total - free, "cuda_bytes": cuda_bytes}
        problem = "it runs on CUDA" if device == "cpu" else why_not(engine.model)
        for key, (settings, _, _) in COMPARISONS.items():
            if key == "flashinfer" and problem is not None:
                result["no_flashinfer"] = problem
                continue
            del engine
            engine = _fresh(path, device, **settings)
            result[key] = [decode(engine, batch) for batch in BATCHES_OF_COMPARISONS]
            if key == "eager":
                result["short_prompts"]["launched"] = short_prompts(engine)
            if key == "flashinfer":
                result["flashinfer_prefill"] = prefill(engine)
        del engine
        engine = _fresh(path, device, enable_prefix_caching=True)
        result["prefix_workload"] = workload(engine, SHARED_PREFIX)
    return result if limit is None else with_percentages(result, engine.model, limit)


def why_not(model: ModelConfig) -> str | None:
    """The reason why FlashInfer cannot be compared, or None."""
    head_dims = {spec.head_dim_k for spec in model.kv_specs()}
    return why_not_flashinfer(head_dims, "bfloat16", "bfloat16", is_deterministic=False)


def bytes_before(device: str) -> int:
    """The used memory of the GPU before an engine starts: CUDA's own and other processes'."""
    if device == "cpu":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _fresh(path: Path, device: str, **settings: Any) -> Engine:
    """Start an engine after the memory of the last engine, to which nothing refers any more, was freed."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return Engine(path, device, **settings)


def gains(result: dict[str, Any]) -> Iterator[str]:
    """Markdown: measured gains beside published ones."""
    yield from ("", "Gains:", "", "| what | measured | published |", "|---|---|---|")
    own = {row["batch"]: row["tokens_per_s"] for row in result["decode"]}
    for key, (_, title, published) in ((key, COMPARISONS[key]) for key in COMPARISONS if key in result):
        ratios = [(row["batch"], row["tokens_per_s"] / own[row["batch"]]) for row in result[key]]
        shown = [f"{1 / ratio if key in SLOWER else ratio:.2f}x at batch {batch}" for batch, ratio in ratios]
        title = title.replace("Without ", "")
        yield f"| {title[0].upper()}{title[1:]} | {', '.join(shown)} | {published} |"
    ratio = result["prefix_workload"]["output_tokens_per_s"] / result["workload"]["output_tokens_per_s"]
    yield f"| Prefix caching, {SHARED_PREFIX:.0%} shared | {ratio:.2f}x of the workload | {PUBLISHED_PREFIX_GAIN} |"


def run_deterministic(name: str, device: str, limit: Machine | None) -> dict[str, Any]:
    """One model with --deterministic. It comes last, because the setting holds for the rest of the process."""
    with TemporaryDirectory() as folder:
        engine = Engine(write_config(Path(folder), name), device, deterministic=True)
        result = {
            "model": f"{name}, deterministic",
            "start_seconds": engine.phases,
            "prefill": prefill(engine),
            "decode": [decode(engine, batch) for batch in BATCHES],
            "workload": workload(engine),
        }
    return result if limit is None else with_percentages(result, engine.model, limit)


def cost_of_determinism(result: dict[str, Any], deterministic: dict[str, Any]) -> str:
    """A sentence about the ratio of the times."""
    own = {row["batch"]: row["step_ms"] for row in result["decode"]}
    steps = [f"{row['step_ms'] / own[row['batch']]:.2f}x at batch {row['batch']}" for row in deterministic["decode"]]
    prompt = deterministic["prefill"]["ms"] / result["prefill"]["ms"]
    whole = deterministic["workload"]["seconds"] / result["workload"]["seconds"]
    return (
        f"Times of {result['model']} with --deterministic over those without: steps of decoding {', '.join(steps)}; "
        f"a prompt {prompt:.2f}x; the workload {whole:.2f}x."
    )


def goals(result: dict[str, Any]) -> Iterator[str]:
    """Markdown: goals and measured values."""
    yield from (
        "",
        f"Goals ({GOAL_MODEL}, bfloat16, one H100):",
        "",
        "| what | goal | measured | reached |",
        "|---|---|---|---|",
    )

    def row(what: str, goal: str, measured: str, is_reached: bool) -> str:
        return f"| {what} | {goal} | {measured} | {'yes' if is_reached else 'no'} |"

    slowest = min(result["decode"], key=lambda each: each["bytes_per_s"])
    rate, at = slowest["bytes_per_s"], f"at batch {slowest['batch']}, the least"
    what = f"decoding at batch {BATCHES[0]} to {BATCHES[-1]}"
    yield row(what, f">= {GOAL_BYTES_PER_S / 1e12:.1f} TB/s", f"{rate / 1e12:.2f} {at}", rate >= GOAL_BYTES_PER_S)
    share = result["decode"][0]["percent_of_copy_rate"]
    yield row(
        "at batch 1", f">= {GOAL_PERCENT_OF_COPY} % of the copy rate", f"{share:.0f} %", share >= GOAL_PERCENT_OF_COPY
    )
    idle = max(each["idle_share"] for each in result["decode"])
    yield row("GPU idle between steps", f"< {GOAL_IDLE:.0%}", f"{idle:.1%} at most", idle < GOAL_IDLE)
    flops = result["prefill"]["flop_per_s"]
    what, goal = f"prompt of {result['prefill']['tokens']} tokens", f">= {GOAL_FLOPS / 1e12:.0f} TFLOP/s"
    yield row(what, goal, f"{flops / 1e12:.0f}", flops >= GOAL_FLOPS)
    seconds = sum(result["start_seconds"].values())
    yield row("start, graphs included", f"< {GOAL_START_SECONDS} s", f"{seconds:.1f} s", seconds < GOAL_START_SECONDS)
    error = abs(plan_error(result["memory"]))
    yield row("plan of memory", f"within {GOAL_PLAN_ERROR:.0%}", f"{error:.1%}", error <= GOAL_PLAN_ERROR)


def plan_error(memory: dict[str, Any]) -> float:
    """The relative error of the planned memory; it is positive if the plan is too large. CUDA's own memory does not
    count.
    """
    taken = memory["taken_bytes"] - memory["cuda_bytes"]
    return float(memory["planned_bytes"] / taken - 1)


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """Markdown of one model."""

    def share(row: dict[str, Any], key: str) -> str:
        return f" ({row[key]:.0f} %)" if key in row else ""

    start = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in result["start_seconds"].items())
    whole = sum(result["start_seconds"].values())
    yield from ("", f"## {result['model']}", "", f"Start: {whole:.1f} s ({start}).")
    made = result["prefill"]
    rate = f"{made['flop_per_s'] / 1e12:.0f} TFLOP/s{share(made, 'percent_of_product_rate')}"
    yield f"Prompt of {made['tokens']} tokens: {made['ms']:.1f} ms, {rate}."
    if "flashinfer_prefill" in result:
        yield f"The same prompt with FlashInfer: {result['flashinfer_prefill']['ms']:.1f} ms."
    if "no_flashinfer" in result:
        yield f"FlashInfer is not compared: {result['no_flashinfer']}."
    done = result["workload"]
    yield (
        f"{done['requests']} requests of {done['prompt_tokens']} -> {done['output_tokens']} tokens: "
        f"{done['seconds']:.2f} s, {done['output_tokens_per_s']:,.0f} output tokens/s, "
        f"idle {100 * done['idle_share']:.0f} %"
        + (f", {done['percent_of_limit']:.0f} % of the limit." if "percent_of_limit" in done else ".")
    )
    for way, times in result.get("short_prompts", {}).items():
        yield f"Steps of short prompts, {way}: " + ", ".join(f"{n} tokens {ms:.2f} ms" for n, ms in times.items()) + "."
    if "taken_bytes" in result.get("memory", {}):
        planned, taken = (result["memory"][key] for key in ("planned_bytes", "taken_bytes"))
        own = result["memory"]["cuda_bytes"]
        yield (
            f"Memory: {planned / 1e9:.2f} GB planned; {taken / 1e9:.2f} GB taken, {own / 1e9:.2f} GB of it before the "
            f"start. The plan is off by {100 * plan_error(result['memory']):+.1f} %."
        )
    titles = {"decode": "Decoding"} | {key: title for key, (_, title, _) in COMPARISONS.items()}
    for key in (name for name in titles if name in result):
        yield from ("", f"{titles[key]}:", "", "| batch | ms per step | tokens/s | TB/s (of the copy rate) | idle % |")
        yield "|---|---|---|---|---|"
        for row in result[key]:
            rate = f"{row['bytes_per_s'] / 1e12:.2f}{share(row, 'percent_of_copy_rate')}"
            idle = f"{100 * row['idle_share']:.1f}"
            yield f"| {row['batch']} | {row['step_ms']:.2f} | {row['tokens_per_s']:,.0f} | {rate} | {idle} |"
    if "prefix_workload" in result:
        yield from gains(result)
    if result["model"] == GOAL_MODEL and "percent_of_copy_rate" in result["decode"][0]:
        yield from goals(result)


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--models", default="Llama-3.1-8B,Qwen3-0.6B", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    limit = None
    if arguments.device == "cuda":
        machine.require()
        limit = limits()
        torch.cuda.empty_cache()
    environment = machine.environment("engine.py")
    head = ["# The engine on a GPU", "", *machine.lines(environment)]
    if limit is not None:
        head.append(machine.limits_line(limit.read_bandwidth, limit.peak_flops))
    print("\n".join(head), flush=True)
    names = arguments.models.split(",")
    plain, deterministic, text = [], [], list(head)

    def note(lines: Iterable[str]) -> None:
        shown = list(lines)
        text.extend(shown)
        print("\n".join(shown), flush=True)

    for name in names:
        gc.collect()
        plain.append(run_model(name, arguments.device, limit))
        note(lines_of(plain[-1]))
    for name, own in zip(names, plain, strict=True):
        gc.collect()
        deterministic.append(run_deterministic(name, arguments.device, limit))
        note(lines_of(deterministic[-1]))
        note(["", cost_of_determinism(own, deterministic[-1])])
    if arguments.save:
        rates: dict[str, float | None] = {"copy_bytes_per_s": None, "flop_per_s": None}
        if limit is not None:
            rates = {"copy_bytes_per_s": limit.read_bandwidth, "flop_per_s": limit.peak_flops}
        saved = {**environment, **rates, "models": [*plain, *deterministic]}
        report.save_published(__file__, "gpu_engine", arguments.save, saved, "\n".join(text) + "\n")


if __name__ == "__main__":
    main()
