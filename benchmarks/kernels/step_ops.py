"""The small ops of a decode step: the start of threads, embeddings, norm, rope with KV write, activation, sampling.

A result is the median of many calls from Python, so it includes the cost of the call. Norm, rope and activation work on
rows in the CPU's caches, as in a model. Their limit is the bytes that they read and write, divided by the read
bandwidth of memory; they can be faster than this limit, because caches are faster than memory. Logits and embeddings
are read from memory, and their limit is the time to read them once. (The limit of an embedding counts the bytes of one
row, but the elements of one row lie in as many cache lines as the elements of 16 rows.)

    python benchmarks/kernels/step_ops.py --rows 1,16,32
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from quire.forward_batch import LayerCache
from quire.kernels import cpu, kv_codes, ops
from quire.kernels.dense import pack_linear, packed_rows
from quire.kernels.fp8 import fp8_rows, pack_fp8, quantize_fp8
from quire.kernels.grouped import grouped_rows, pack_grouped, quantize_grouped
from quire.kernels.layer_rules import HeadRotation


def median_us(calls: dict[str, Callable[[int], Any]], seconds: float) -> dict[str, float]:
    """The median microseconds of each call. The calls take turns, ten times each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.perf_counter() + seconds * len(calls)
    turn = 0
    while time.perf_counter() < deadline or turn < 3:
        for name, call in calls.items():
            for i in range(10):
                start = time.perf_counter()
                call(turn * 10 + i)
                times[name].append(time.perf_counter() - start)
        turn += 1
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def cases(R: int, dtype: torch.dtype, vocab: int) -> tuple[dict[str, Callable[[int], Any]], dict[str, int]]:
    """Calls of a step of R rows of the Qwen3-0.6B shape, and the bytes that each must touch."""
    D, H, G, E, P, inner = 1024, 16, 8, 128, 16, 3072
    qkv_TC = torch.randn(R, (H + 2 * G) * E).to(dtype)
    q, k, v = (x.unflatten(1, (-1, E)) for x in qkv_TC.split((H * E, G * E, G * E), dim=1))
    cache = LayerCache(torch.zeros(R * 4, G, P, E, dtype=dtype), torch.zeros(R * 4, G, P, E, dtype=dtype))
    codes = {name: [torch.zeros(R * 4, G, P, E, dtype=name) for _ in "kv"] for name in kv_codes.CODE_DTYPES}
    scales = [torch.zeros(R * 4, G, P) for _ in "kv"]
    angles, weight_E = torch.randn(4096, E // 2), torch.ones(E, dtype=dtype)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)  # rotations: q is rotated in place in every call
    rotation = HeadRotation(cos_sin, weight_E, weight_E, 1e-6)
    positions, slots = torch.arange(R) * 7, torch.arange(R) * 4 * P + 5
    x, residual, weight_D, out = torch.randn(R, D).to(dtype), torch.randn(R, D).to(dtype), torch.ones(D), torch.empty(0)
    weight_D, out = weight_D.to(dtype), torch.empty_like(x)
    gate_up = torch.randn(R, 2 * inner).to(dtype)
    table = torch.randn(vocab, D, dtype=torch.bfloat16).to(dtype)
    plain, fp8, int8 = pack_linear(table), pack_fp8(quantize_fp8(table)), pack_grouped(quantize_grouped(table, 8, D))
    tokens = [torch.randint(vocab, (R,)) for _ in range(64)]
    flat = [torch.randn(R, vocab) * 2 for _ in range(max(2, min(64, (256 << 20) // (R * vocab * 4))))]
    logits = [x.clone() for x in flat]
    for row in (row for copy in logits for row in copy):
        row[torch.randint(vocab, (50,))] += 16.0  # a few likely tokens, as in a trained model
    masked, masks = [torch.empty_like(x) for x in flat], torch.zeros(R, -(-vocab // 32), dtype=torch.int32)
    masks[:, torch.randint(masks.shape[1], (50,))] = 5  # few tokens are allowed, as between two values of JSON
    rows = torch.arange(R, dtype=torch.int32)
    temperature, top_k = torch.full((R,), 0.8), torch.zeros(R, dtype=torch.int32)
    top_p, min_p, uniform = torch.full((R,), 0.95), torch.zeros(R), torch.rand(R, dtype=torch.float64)
    token_ids = torch.randint(vocab, (R,))

    def to_codes(name: torch.dtype) -> Callable[[int], Any]:
        keys, values = codes[name]
        k_scales, v_scales = scales if name == torch.int8 else (None, None)
        cache = LayerCache(keys, values, k_scales, v_scales)
        return lambda _: ops.rope_and_cache(q, k, v, positions, slots, cache, rotation)

    calls: dict[str, Callable[[int], Any]] = {
        "embeddings": lambda i: packed_rows(plain, tokens[i % len(tokens)]),
        "embeddings, int8": lambda i: grouped_rows(int8, tokens[i % len(tokens)], dtype),
        "embeddings, fp8": lambda i: fp8_rows(fp8, tokens[i % len(tokens)], dtype),
        "rms_norm": lambda _: ops.rms_norm(x, weight_D, 1e-6, out=out),
        "add_rms_norm": lambda _: ops.add_rms_norm(x, residual, weight_D, 1e-6, out=out),
        "rope_and_cache": lambda _: ops.rope_and_cache(q, k, v, positions, slots, cache, rotation),
        **{f"rope_and_cache, {str(name).removeprefix('torch.')}": to_codes(name) for name in codes},
        "gated_activation": lambda _: ops.gated_activation("silu", gate_up),
        "forbid_tokens": lambda i: ops.forbid_tokens(masked[i % len(masked)], masks, rows),
        "greedy": lambda i: ops.greedy(logits[i % len(logits)]),
        "sample": lambda i: ops.sample(logits[i % len(logits)], temperature, top_k, top_p, min_p, uniform),
        "sample, flat": lambda i: ops.sample(flat[i % len(flat)], temperature, top_k, top_p, min_p, uniform),
        "logprobs, top 20": lambda i: ops.logprobs(logits[i % len(logits)], token_ids, 20),
    }
    logit_bytes, size = R * vocab * 4, dtype.itemsize
    rotated = 2 * H + 2 * G  # rows of heads that are read or written in the model's dtype, without the cache's rows
    num_bytes = {
        "embeddings": 2 * R * D * size,
        "embeddings, int8": R * (int8.nbytes // vocab + D * size),
        "embeddings, fp8": R * (fp8.nbytes // vocab + D * size),
        "rms_norm": 2 * R * D * size,
        "add_rms_norm": 4 * R * D * size,
        "rope_and_cache": R * (rotated + 2 * G) * E * size,
        **{f"rope_and_cache, {str(name).removeprefix('torch.')}": R * (rotated * size + 2 * G) * E for name in codes},
        "gated_activation": 3 * R * inner * size,
        "forbid_tokens": logit_bytes,
        "greedy": logit_bytes,
        "sample": logit_bytes,
        "sample, flat": logit_bytes,
        "logprobs, top 20": logit_bytes,
    }
    return calls, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,32")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--isa", default="", help="instruction set; default: the best present")
    parser.add_argument("--threads", type=int, default=cpu.default_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="per op")
    parser.add_argument("--json", default="", help="write the rows to this file")
    args = parser.parse_args()
    if args.isa:
        cpu.set_isa(args.isa)
    cpu.set_num_threads(args.threads)
    torch.set_num_threads(1)
    dispatch = {
        "one task (no thread)": lambda _: cpu._C.thread_pool_probe(1),
        "two tasks": lambda _: cpu._C.thread_pool_probe(2),
        "sixteen tasks": lambda _: cpu._C.thread_pool_probe(16),
    }
    print(f"isa {cpu.isa()}, {cpu.get_num_threads()} threads, {args.dtype}")
    rows: list[dict[str, Any]] = [{"parallel_for_us": median_us(dispatch, args.seconds)}]
    print("parallel_for: " + ", ".join(f"{name} {us:.1f} us" for name, us in rows[0]["parallel_for_us"].items()))
    for R in (int(r) for r in args.rows.split(",")):
        calls, num_bytes = cases(R, getattr(torch, args.dtype), args.vocab)
        times, bandwidth = median_us(calls, args.seconds), cpu.read_bandwidth(256 << 20)
        limits = {name: count / bandwidth * 1e6 for name, count in num_bytes.items()}
        rows.append({"rows": R, "us": times, "limit_us": limits, "bandwidth_gb_s": bandwidth / 1e9})
        cells = [f"{name} {us:.1f} us ({limits[name] / us:.0%} of the limit)" for name, us in times.items()]
        print(f"{R} rows: " + ", ".join(cells), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"isa": cpu.isa(), "threads": args.threads, "dtype": args.dtype, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
