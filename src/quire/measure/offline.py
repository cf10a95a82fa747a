"""`quire bench throughput` and `latency`: the engine in this process, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.lora.request import LoRARequest
from quire.measure.floor import Work, floor, measure_machine, together
from quire.measure.options import Workload
from quire.measure.statistics import LEVEL, mean_interval, summarize
from quire.measure.workload import BenchRequest, chat_render, make_requests
from quire.outputs import RequestOutput

PERCENTAGES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class Engine:
    """An LLM, and the options of a benchmark's requests."""

    llm: LLM
    n: int
    detokenize: bool
    adapter: LoRARequest | None = None

    def generate(self, requests: Sequence[BenchRequest], progress: bool) -> list[RequestOutput]:
        """The outputs of all requests at once, with full length, sampled at temperature 1 as in vLLM."""
        params = [
            SamplingParams(
                n=self.n,
                temperature=1.0,
                top_p=1.0,
                ignore_eos=True,
                max_tokens=request.output_len,
                detokenize=self.detokenize,
            )
            for request in requests
        ]
        prompts: list[Any] = [
            request.prompt if isinstance(request.prompt, str) else {"prompt_token_ids": request.prompt}
            for request in requests
        ]
        return self.llm.generate(prompts, params, use_tqdm=progress, lora_request=self.adapter)

    def hardware_limit(self, rounds: Sequence[Sequence[RequestOutput]], seconds: float) -> dict[str, Any] | None:
        """The hardware limit; None on a GPU, or without the compiled kernels, which measure the machine."""
        resolved = self.llm.resolved
        if resolved.device.device != "cpu":
            return None
        machine = measure_machine(resolved.model.dtype, resolved.device.num_threads)
        if machine is None:
            return None
        floors = [
            floor(
                *(self.llm.model_config, resolved.model.dtype, _work(outputs), machine),
                *(resolved.scheduler.max_num_seqs, resolved.model.kv_cache_dtype, resolved.model.quantization),
            )
            for outputs in rounds
        ]
        return together(floors).report(seconds, machine)


def _work(outputs: Sequence[RequestOutput]) -> list[Work]:
    """The work of all continuations. The first continuation of a prompt computes it, and the others share it."""
    work = []
    for output in outputs:
        num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens or 0
        for completion in output.outputs:
            work.append(Work(num_prompt - num_cached, num_cached, len(completion.token_ids)))
            num_cached = num_prompt
    return work


def throughput(
    config: EngineConfig,
    workload: Workload,
    *,
    n: int = 1,
    num_warmups: int = 0,
    num_rounds: int = 1,
    detokenize: bool = True,
    progress: bool = True,
    lora_path: str | None = None,
) -> dict[str, Any]:
    """Send requests as fast as the engine takes them. The result has vLLM's JSON keys, for all rounds together.

    Args:
        lora_path: the folder of an adapter for all requests; None: they use the base model.
    """
    adapter = None if lora_path is None else LoRARequest("adapter", 1, lora_path)
    engine = Engine(LLM.from_engine_args(config), n, detokenize, adapter)
    tokenizer = engine.llm.get_tokenizer()
    render = chat_render(tokenizer)
    if num_warmups:
        engine.generate(make_requests(_with(workload, 1 << 40, num_warmups), tokenizer, render), False)
    outputs: list[list[RequestOutput]] = []
    rounds = []
    for i in range(num_rounds):
        requests = make_requests(_with(workload, workload.seed + i, workload.num_prompts), tokenizer, render)
        start = time.perf_counter()
        found = engine.generate(requests, progress)
        rounds.append(_rates(found, time.perf_counter() - start))
        outputs.append(found)
    total = _rates([output for each in outputs for output in each], sum(each["elapsed_time"] for each in rounds))
    rates = [each["tokens_per_second"] for each in rounds]
    return {
        "model_id": config.model,
        **total,
        "rounds": rounds if num_rounds > 1 else [],
        "confidence_intervals": {"tokens_per_second": mean_interval(rates)} if num_rounds >= 3 else {},
        "hardware_limit": engine.hardware_limit(outputs, total["elapsed_time"]),
    }


def _with(workload: Workload, seed: int, count: int) -> Workload:
    prefixes = min(workload.prefix_repetition_num_prefixes, count)
    return replace(workload, seed=seed, num_prompts=count, prefix_repetition_num_prefixes=prefixes)


def _rates(outputs: Sequence[RequestOutput], seconds: float) -> dict[str, Any]:
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (num_input + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
        "total_prompt_tokens": num_input,
        "total_output_tokens": num_output,
        "cached_prompt_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
    }


def throughput_text(result: dict[str, Any]) -> str:
    """vLLM's lines."""
    return (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {result['total_prompt_tokens']}\n"
        f"Total num output tokens:  {result['total_output_tokens']}"
    )


def latency(
    config: EngineConfig,
    *,
    input_len: int = 32,
    output_len: int = 128,
    batch_size: int = 8,
    n: int = 1,
    num_iters_warmup: int = 10,
    num_iters: int = 30,
    detokenize: bool = True,
    seed: int = 0,
    bar: Callable[[int, str], Any],
) -> dict[str, Any]:
    """Time one batch repeatedly, with other prompts each time. The result has vLLM's JSON keys."""
    if min(input_len, output_len, batch_size, num_iters) < 1:
        raise ConfigError("Lengths, batch and iterations must be 1 or more", value=(input_len, output_len, batch_size))
    engine = Engine(LLM.from_engine_args(config), n, detokenize)
    longest = engine.llm.resolved.model.max_model_len
    if input_len + output_len > longest:
        raise ConfigError(
            "The context is too short", value=input_len + output_len, expected=f"at most {longest} tokens in all"
        )
    rng = np.random.default_rng(seed)
    vocab_size = engine.llm.model_config.vocab_size

    def once() -> tuple[float, list[RequestOutput]]:
        ids = rng.integers(0, vocab_size, (batch_size, input_len)).tolist()
        requests = [BenchRequest(own, input_len, output_len) for own in ids]
        start = time.perf_counter()
        outputs = engine.generate(requests, False)
        return time.perf_counter() - start, outputs

    for count, title in ((num_iters_warmup, "Warmup iterations"), (num_iters, "Bench iterations")):
        progress = bar(count, title)
        runs = []
        for _ in range(count):
            runs.append(once())
            progress.update()
        progress.close()
    seconds = [each for each, _ in runs]
    return {
        "model_id": config.model,
        "avg_latency": float(np.mean(seconds)),
        "latencies": seconds,
        "percentiles": {str(p): float(np.percentile(seconds, p)) for p in PERCENTAGES},
        "confidence_intervals": _latency_intervals(seconds),
        "hardware_limit": engine.hardware_limit([runs[-1][1]], float(np.median(seconds))),
    }


def _latency_intervals(seconds: Sequence[float]) -> dict[str, tuple[float, float]]:
    """The intervals of the mean, with 3 iterations or more, and of the percentiles that have one in `summarize`."""
    if len(seconds) < 3:
        return {}
    found = summarize(seconds, PERCENTAGES).intervals
    percentiles = {f"p{p}_latency": found[f"p{p}"] for p in PERCENTAGES if f"p{p}" in found}
    return {"avg_latency": mean_interval(seconds), **percentiles}


def latency_text(result: dict[str, Any]) -> str:
    """vLLM's lines."""
    lines = [f"Avg latency: {result['avg_latency']} seconds"]
    return "\n".join(
        [*lines, *(f"{p}% percentile latency: {value} seconds" for p, value in result["percentiles"].items())]
    )


def intervals_text(result: dict[str, Any]) -> list[str]:
    """A line for each confidence interval."""
    return [
        f"{LEVEL:.0%} confidence interval of {key}: {low:.4g} to {high:.4g}"
        for key, (low, high) in result["confidence_intervals"].items()
    ]
