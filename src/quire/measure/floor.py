"""The hardware limit: the least time a machine could take for a workload, from counted bytes and operations.

A lower bound whatever the schedule. Every step that gives tokens reads all weights once; every token costs its
multiplications. Neither can be faster than memory and arithmetic allow, and the larger of the two is the floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quire.formats.kv_format import kv_format
from quire.formats.weight_format import GroupedFormat
from quire.layer_spec import KvSpec
from quire.model_config import ModelConfig

FloatArray = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Machine:
    """Ceilings, measured: bytes, floating point and 8-bit integer operations per second over all cores in use."""

    read_bandwidth: float
    peak_flops: float
    peak_int8_ops: float


@dataclass(frozen=True)
class Work:
    """One request as computed: prompt tokens that were not in the prefix cache, those that were, output tokens."""

    num_prompt: int
    num_cached: int
    num_output: int


@dataclass(frozen=True)
class Floor:
    """What has to move and to be computed, and the seconds that takes at least."""

    num_bytes: float
    num_flops: float
    num_int8_ops: float
    seconds: float
    bound: str  # memory or arithmetic

    def report(self, seconds: float, machine: Machine) -> dict[str, Any]:
        """For JSON, with the percentage of the limit that a measured time reached."""
        return {"percent": 100 * self.seconds / seconds, **asdict(self), **asdict(machine)}


def floor(
    model: ModelConfig,
    dtype: str,
    work: Sequence[Work],
    machine: Machine,
    max_num_seqs: int | None = None,
    kv_cache_dtype: str = "auto",
    quantization: str | None = None,
) -> Floor:
    """The floor of a set of requests that could all run side by side.

    Args:
        dtype: a key of model_config.DTYPE_BYTES, of weights and activations.
        max_num_seqs: requests that may run at once; None: all.
        kv_cache_dtype: as the setting of that name.
        quantization: of the weights, as ModelConfig.weight_bytes takes it. Integers are multiplied as 8-bit integers.
    """
    head = model.vocab_size * model.hidden_size  # the embeddings are looked up, the output layer is read and multiplied
    blocks = model.num_block_parameters()
    total_output = sum(request.num_output for request in work)
    num_steps = max((request.num_output for request in work), default=0)
    if max_num_seqs is not None:
        num_steps = max(num_steps, -(-total_output // max_num_seqs))
    kv = kv_format(kv_cache_dtype, dtype)
    kinds = Counter((part.kv_spec, part.flops_per_pair) for layer in model.layers if (part := layer.attention))
    kv_bytes = attention = 0.0
    for request in work:
        length = request.num_cached + request.num_prompt
        new = np.arange(request.num_cached + 1, length + 1, dtype=np.float64)
        decoded = np.arange(length + 1, length + request.num_output, dtype=np.float64)
        for (spec, flops), count in kinds.items():
            decode_reads, prompt_reads = (count * float(_seen(spec, lengths).sum()) for lengths in (decoded, new))
            kv_bytes += decode_reads * spec.bytes_per_token(kv) + count * spec.state_bytes * len(decoded)
            attention += flops * (decode_reads + prompt_reads)
    num_bytes = num_steps * model.read_bytes_per_step(dtype, quantization) + kv_bytes
    num_tokens = sum(request.num_prompt + max(request.num_output - 1, 0) for request in work)
    num_ops = 2 * blocks * num_tokens + 2 * head * total_output + attention
    integer_blocks, integer_head = _integer_parameters(model, quantization)
    num_int8_ops = 2.0 * (integer_blocks * num_tokens + integer_head * total_output)
    num_flops = num_ops - num_int8_ops
    by_memory = num_bytes / machine.read_bandwidth
    by_arithmetic = num_flops / machine.peak_flops + num_int8_ops / machine.peak_int8_ops
    bound = "memory" if by_memory >= by_arithmetic else "arithmetic"
    return Floor(num_bytes, num_flops, num_int8_ops, max(by_memory, by_arithmetic), bound)


def _seen(spec: KvSpec, lengths: FloatArray) -> FloatArray:
    """Tokens that the last one of a sequence sees in a layer, for every length."""
    if spec.kind == "chunked":
        return np.asarray((lengths - 1) % spec.window + 1)
    return np.minimum(lengths, spec.window or np.inf)


def _integer_parameters(model: ModelConfig, quantization: str | None) -> tuple[int, int]:
    """Elements of weights that are held as integers: of the layers, and of the output projection."""
    blocks = output = 0
    for linear in (*model.active_linears(), model.output_linear()):
        parts = (part for part in model.stored(linear, quantization) if isinstance(part.held, GroupedFormat))
        elements = sum(part.shape.out_features * part.shape.in_features for part in parts)
        if linear == model.output_linear():
            output += elements
        else:
            blocks += elements
    return blocks, output


def together(floors: Sequence[Floor]) -> Floor:
    """Of rounds one after the other."""
    longest = max(floors, key=lambda each: each.seconds)
    return Floor(
        sum(each.num_bytes for each in floors),
        sum(each.num_flops for each in floors),
        sum(each.num_int8_ops for each in floors),
        sum(each.seconds for each in floors),
        longest.bound,
    )


def measure_machine(dtype: str, num_threads: int) -> Machine | None:
    """The ceilings of this machine now; None without the compiled kernels, which measure them. Takes a second.

    Args:
        num_threads: cores the engine has. The kernels of this process keep so many.
    """
    import torch

    from quire.kernels import cpu

    if not cpu.available():
        return None
    cpu.set_num_threads(num_threads)
    return Machine(cpu.read_bandwidth(), cpu.peak_flops(getattr(torch, dtype)), cpu.peak_int8_ops())
