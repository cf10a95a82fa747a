"""The GPU kernels alone, on real shapes: their times, and their shares of the GPU's limit, which is measured in the
same run.

    python benchmarks/gpu/kernels.py [--models Llama-3.1-8B,Qwen3-0.6B] [--save HARDWARE]

Each case runs over copies of its inputs that together exceed the L2 cache, captured in a CUDA graph, so that neither
launches nor the cache are measured. Times are medians of 20 replays. It needs an NVIDIA GPU.

Dimensions: T tokens, H query heads, G kv heads, E head dim, B cache blocks, P block size, S sequences, V vocabulary.
Products have M rows, K in-features, N out-features and G groups along K.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import machine
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.formats.weight_format import GGUF, GroupedFormat
from quire.forward_batch import LayerCache
from quire.kernels.fp8 import fp8_linear, pack_fp8, quantize_fp8
from quire.kernels.fp8_weight import Fp8Weight
from quire.kernels.grouped import grouped_linear, pack_grouped
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.kv_codes import CODE_DTYPES
from quire.kernels.layer_rules import AttentionRule, HeadRotation
from quire.kernels.triton import activation, attention, dense, norm, rope_cache, sampling
from quire.kernels.triton.launch import has_wgmma
from quire.measure import report
from quire.measure.floor import Machine

REPLAYS = 20
COLD_BYTES = 256 << 20  # the size of all copies: five times the L2 cache of an H100
BLOCK_SIZE = 16
VOCABULARY = 151_936
# Formats of the products: AWQ's, a K-quant, and the format of --quantization int8.
FORMS = {
    "int4 g128": GroupedFormat(4, 128, "float16", "uint8"),
    "Q4_K": GGUF["Q4_K"],
    "int8": GroupedFormat(8, None),
}


@dataclass(frozen=True)
class Model:
    """The sizes of a model that matter here."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    inner: int


MODELS = (Model("Qwen3-0.6B", 16, 8, 128, 1024, 3072), Model("Llama-3.1-8B", 32, 8, 128, 4096, 14336))


@dataclass
class Case:
    """Calls that do the same work on copies of the inputs, with the bytes and operations of one call."""

    name: str
    calls: Sequence[Callable[..., Any]]
    num_bytes: float = 0.0
    num_flops: float = 0.0


def seconds_per_call(calls: Sequence[Callable[..., Any]]) -> float:
    """The median over the replays of a graph that runs every call once."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(found)


def num_copies(num_bytes: float) -> int:
    return max(1, min(32, int(-(-COLD_BYTES // num_bytes))))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def attention_case(
    model: Model, query_len: int, seq_len: int, num_seqs: int, kv_dtype: torch.dtype = torch.bfloat16
) -> Case:
    H, G, E = model.num_q_heads, model.num_kv_heads, model.head_dim
    blocks = -(-seq_len // BLOCK_SIZE)
    kv_bytes = 2 * num_seqs * seq_len * G * (E * kv_dtype.itemsize + 4 * (kv_dtype == torch.int8))
    calls = []
    cu_seqlens = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * query_len
    seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device="cuda")
    for _ in range(num_copies(kv_bytes)):
        caches = randn(2, num_seqs * blocks, G, BLOCK_SIZE, E).to(kv_dtype)
        scales = torch.rand(2, num_seqs * blocks, G, BLOCK_SIZE, device="cuda") if kv_dtype == torch.int8 else ()
        tables = torch.randperm(num_seqs * blocks, device="cuda").int().view(num_seqs, blocks)
        q_THE = randn(num_seqs * query_len, H, E)
        out_THE = torch.empty_like(q_THE)
        cache, rule = LayerCache(caches[0], caches[1], *scales), AttentionRule(E**-0.5)
        calls.append(partial(attention.paged_attention, q_THE, cache, tables, seq_lens, cu_seqlens, rule, out_THE))
    keys = query_len * (seq_len - query_len) + query_len * (query_len + 1) / 2
    kind = "decode" if query_len == 1 else "prefill"
    codes = "" if kv_dtype == torch.bfloat16 else f" {str(kv_dtype).removeprefix('torch.')}"
    return Case(f"{kind}{codes} {model.name} {num_seqs} x {seq_len}", calls, kv_bytes, 4 * num_seqs * H * E * keys)


def row_cases(model: Model, T: int) -> list[Case]:
    """Norm, activation, rope and KV write of T tokens."""
    H, G, E = model.num_q_heads, model.num_kv_heads, model.head_dim
    weight_D, weight_E = randn(model.hidden), randn(E)
    norm_bytes, silu_bytes = 8 * T * model.hidden, 6 * T * model.inner
    rope_bytes = 2 * T * E * (2 * H + 4 * G)
    norms, silus, ropes, norms_to_fp8, silus_to_fp8 = [], [], [], [], []
    for _ in range(num_copies(norm_bytes)):
        x_TD, residual_TD = randn(T, model.hidden), randn(T, model.hidden)
        norms.append(partial(norm.norm, x_TD, residual_TD, 1.0, weight_D, None, 1e-6, 0.0, x_TD))
        norms_to_fp8.append(partial(norm.rms_norm_to_fp8, x_TD, residual_TD, 1.0, weight_D, 1e-6, 0.0))
    for _ in range(num_copies(silu_bytes)):
        x_T2I, out_TI = randn(T, 2 * model.inner), torch.empty(T, model.inner, dtype=torch.bfloat16, device="cuda")
        silus.append(partial(activation.gated_activation, "silu", x_T2I, out_TI))
        silus_to_fp8.append(partial(activation.gated_activation_to_fp8, "silu", x_T2I))
    positions_T = torch.arange(T, device="cuda")
    rotation = HeadRotation(torch.rand(T, E, device="cuda"), weight_E, weight_E, 1e-6)
    for _ in range(num_copies(rope_bytes)):
        qkv = randn(T, (H + 2 * G) * E)
        q_THE, k_TGE, v_TGE = (x.unflatten(1, (-1, E)) for x in qkv.split([H * E, G * E, G * E], dim=1))
        caches = randn(2, -(-T // BLOCK_SIZE), G, BLOCK_SIZE, E)
        arguments = (q_THE, k_TGE, v_TGE, positions_T, positions_T, LayerCache(caches[0], caches[1]), rotation)
        ropes.append(partial(rope_cache.rope_and_cache, *arguments))
    return [
        Case(f"add and norm {model.name} {T} tokens", norms, norm_bytes),
        Case(f"silu {model.name} {T} tokens", silus, silu_bytes),
        Case(f"rope and KV write {model.name} {T} tokens", ropes, rope_bytes),
        Case(f"add and norm to FP8 {model.name} {T} tokens", norms_to_fp8, 7 * T * model.hidden),
        Case(f"silu to FP8 {model.name} {T} tokens", silus_to_fp8, 5 * T * model.inner),
    ]


def sampling_cases(R: int) -> list[Case]:
    logits = [torch.randn(R, VOCABULARY, device="cuda") * 2 for _ in range(num_copies(4.0 * R * VOCABULARY))]
    full, ids_R = torch.ones(R, device="cuda"), torch.empty(R, dtype=torch.int64, device="cuda")
    top_k_R = torch.zeros(R, dtype=torch.int32, device="cuda")
    uniform_R = torch.rand(R, dtype=torch.float64, device="cuda")
    greedy = [partial(sampling.greedy, x, ids_R) for x in logits]
    top_p = [partial(sampling.sample, x, 0.8 * full, top_k_R, 0.95 * full, 0 * full, uniform_R, ids_R) for x in logits]
    return [
        Case(f"greedy {R} rows", greedy, 4.0 * R * VOCABULARY),
        Case(f"temperature 0.8, top-p 0.95 {R} rows", top_p, 4.0 * R * VOCABULARY),
    ]


def linear_case(M: int, N: int, K: int) -> Case:
    weights = [randn(N, K) for _ in range(num_copies(2.0 * N * K))]
    x_MK = randn(M, K)
    calls = [partial(F.linear, x_MK, w) for w in weights]
    return Case(f"cuBLAS {M} x {K} -> {N}", calls, 2.0 * (N * K + M * K + M * N), 2.0 * M * N * K)


def deterministic_cases(model: Model) -> Iterator[Case]:
    """The kernels that --deterministic uses instead of cuBLAS and of attention whose parts depend on the batch."""
    for M in (1, 32, 256, 2048):
        for N, K in ((2 * model.inner, model.hidden), (model.hidden, model.inner)):
            weights = [randn(N, K) for _ in range(num_copies(2.0 * N * K))]
            x_MK, out_MN = randn(M, K), torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
            calls = [partial(dense.linear, x_MK, w, None, out_MN) for w in weights]
            num_bytes = 2.0 * (N * K + M * K + M * N)
            yield Case(f"deterministic {M} x {K} -> {N}", calls, num_bytes, 2.0 * M * N * K)
    H, G, E = model.num_q_heads, model.num_kv_heads, model.head_dim
    for query_len, seq_len, num_seqs in ((1, 8192, 1), (1, 1024, 32), (1, 1024, 256), (2048, 2048, 1)):
        case = attention_case(model, query_len, seq_len, num_seqs)
        sizes = (query_len * num_seqs, num_seqs, H // G, G, E, -(-seq_len // BLOCK_SIZE) * BLOCK_SIZE)
        shape = attention.choose_fixed_shape(*sizes, has_wgmma(torch.device("cuda", 0)))
        calls = [partial(call, shape=shape) for call in case.calls]
        yield replace(case, name=f"deterministic {case.name}", calls=calls)


def random_weight(form: GroupedFormat, N: int, K: int) -> GroupedWeight:
    """A random weight of this form; the size of its elements does not matter."""
    group_size = form.group_size_of(K)
    G = -(-K // group_size)

    def numbers(name: str | None, count: int) -> Tensor | None:
        if name is None:
            return None
        if name in ("int8", "uint8"):
            return torch.randint(1, 1 << min(form.bits, 6), (N, count), dtype=getattr(torch, name), device="cuda")
        return torch.rand(N, count, device="cuda").to(getattr(torch, name)) / 64

    has_zeros, num_supers = form.offsets == "uint8", -(-G // form.super_size)
    scales_NG = numbers(form.scales, G)
    assert scales_NG is not None
    return GroupedWeight(
        codes_NK=torch.randint(0, 1 << form.bits, (N, K), dtype=torch.uint8, device="cuda"),
        bits=form.bits,
        group_size=group_size,
        scales_NG=scales_NG,
        zeros_NG=numbers(form.offsets, G) if has_zeros else None,
        minima_NG=None if has_zeros else numbers(form.offsets, G),
        super_scales_NS=numbers("float16", num_supers) if form.scales == "int8" else None,
        super_minima_NS=numbers("float16", num_supers) if form.offsets == "int8" else None,
        super_size=form.super_size,
    )


def grouped_case(name: str, form: GroupedFormat, M: int, N: int, K: int) -> Case:
    weights = [pack_grouped(random_weight(form, N, K)) for _ in range(num_copies(form.num_bytes(N, K)))]
    x_MK = randn(M, K)
    calls = [partial(grouped_linear, x_MK, w) for w in weights]
    num_bytes = form.num_bytes(N, K) + 2.0 * (M * K + M * N)
    return Case(f"{name} {M} x {K} -> {N}", calls, num_bytes, 2.0 * M * N * K)


def fp8_case(M: int, N: int, K: int, group_size: int) -> Case:
    """A product with FP8 weights. With `group_size` 0, each output channel has a scale, and torch._scaled_mm multiplies
    many rows.
    """
    weights = []
    for _ in range(num_copies(float(N * K))):
        weight = quantize_fp8(randn(N, K))
        if group_size:
            weight = Fp8Weight(weight.codes_NK, weight.scales_NG.repeat(1, -(-K // group_size)), group_size)
        weights.append(pack_fp8(weight))
    x_MK = randn(M, K)
    calls = [partial(fp8_linear, x_MK, w) for w in weights]
    name = "FP8 in blocks" if group_size else "FP8"
    return Case(f"{name} {M} x {K} -> {N}", calls, N * K + 2.0 * (M * K + M * N), 2.0 * M * N * K)


def limits() -> Machine:
    """The rates of a copy and of a large product in bfloat16. Integer weights are multiplied in bfloat16 too."""
    pairs = [(randn(1 << 27), torch.empty(1 << 27, dtype=torch.bfloat16, device="cuda")) for _ in range(4)]
    copy = seconds_per_call([partial(b.copy_, a) for a, b in pairs])
    a, b = randn(8192, 8192), randn(8192, 8192)
    product = seconds_per_call([lambda: a @ b])
    flops = 2 * 8192**3 / product
    return Machine(2 * 2 * (1 << 27) / copy, flops, flops)


def cases(names: Sequence[str]) -> Iterator[Case]:
    for model in (model for model in MODELS if model.name in names):
        for num_seqs, seq_len in ((1, 1024), (1, 8192), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (32, 8192)):
            yield attention_case(model, 1, seq_len, num_seqs)
        for query_len, num_seqs in ((512, 4), (2048, 1), (8192, 1)):
            yield attention_case(model, query_len, query_len, num_seqs)
        for T in (1, 32, 256, 2048):
            yield from row_cases(model, T)
        for kv_dtype in CODE_DTYPES:
            for num_seqs, seq_len in ((1, 8192), (32, 1024), (256, 1024)):
                yield attention_case(model, 1, seq_len, num_seqs, kv_dtype)
            yield attention_case(model, 2048, 2048, 1, kv_dtype)
        for M in (1, 8, 32, 128, 256, 2048):
            for N, K in ((2 * model.inner, model.hidden), (model.hidden, model.inner)):  # many columns, and few
                yield linear_case(M, N, K)
                for name, form in FORMS.items():
                    yield grouped_case(name, form, M, N, K)
                yield fp8_case(M, N, K, 0)
                yield fp8_case(M, N, K, 128)
        yield from deterministic_cases(model)
    for R in (1, 32, 256):
        yield from sampling_cases(R)


def markdown(environment: dict[str, Any], bandwidth: float, flops: float, rows: list[dict[str, Any]]) -> str:
    """The text of the result file."""
    lines = [
        "# GPU kernels",
        "",
        *machine.lines(environment),
        machine.limits_line(bandwidth, flops),
        "",
        "| case | us | % of the copy rate | % of the product rate |",
        "|---|---|---|---|",
    ]
    for row in rows:
        shares = f"{row['percent_of_copy_rate']:.0f} | {row['percent_of_product_rate']:.0f}"
        lines.append(f"| {row['case']} | {row['microseconds']:.1f} | {shares} |")
    return "\n".join(lines) + "\n"


def result_of(case: Case, seconds: float, bandwidth: float, flops: float) -> dict[str, Any]:
    """A row of the result file."""
    return {
        "case": case.name,
        "microseconds": 1e6 * seconds,
        "percent_of_copy_rate": 100 * case.num_bytes / bandwidth / seconds,
        "percent_of_product_rate": 100 * case.num_flops / flops / seconds,
    }


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--models", default="Llama-3.1-8B,Qwen3-0.6B", help="models that give the shapes")
    arguments = parser.parse_args()
    machine.require()
    limit = limits()
    bandwidth, flops = limit.read_bandwidth, limit.peak_flops
    environment = machine.environment("kernels.py")
    print("\n".join(machine.lines(environment)))
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bfloat16 product {flops / 1e12:.0f} TFLOP/s")
    rows = []
    for case in cases(arguments.models.split(",")):
        row = result_of(case, seconds_per_call(case.calls), bandwidth, flops)
        rows.append(row)
        shares = f"{row['percent_of_copy_rate']:6.1f} % {row['percent_of_product_rate']:6.1f} %"
        print(f"{case.name:45} {row['microseconds']:10.1f} us {shares}", flush=True)
        case.calls = ()  # frees their tensors
        torch.cuda.empty_cache()
    if arguments.save:
        result = {**environment, "copy_bytes_per_s": bandwidth, "flop_per_s": flops, "cases": rows}
        text = markdown(environment, bandwidth, flops, rows)
        report.save_published(__file__, "gpu_kernels", arguments.save, result, text)


if __name__ == "__main__":
    main()
