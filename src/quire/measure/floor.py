"""The hardware limit: the least time of a workload on a machine, from counted bytes and operations.

It is a lower bound for every schedule. A step that gives tokens reads all weights once, and every token costs its
multiplications. Memory bounds the first and arithmetic the second; the larger of the two times is the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.cost.arithmetic import Load, StepArithmetic
from quire.model_config import ModelConfig


@dataclass(frozen=True)
class Machine:
    """Measured ceilings: bytes, floating-point and 8-bit integer operations per second of all cores in use."""

    read_bandwidth: float
    peak_flops: float
    peak_int8_ops: float


@dataclass(frozen=True)
class Work:
    """The tokens of one request: computed prompt tokens, prompt tokens from the prefix cache, output tokens."""

    num_prompt: int
    num_cached: int
    num_output: int


@dataclass(frozen=True)
class Floor:
    """The bytes and operations of a workload, and the least seconds for them."""

    num_bytes: float
    num_flops: float
    num_int8_ops: float
    seconds: float
    bound: str  # memory or arithmetic

    def report(self, seconds: float, machine: Machine) -> dict[str, Any]:
        """The object for JSON, with the percentage of the limit that a measured time reached."""
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
        dtype: the dtype of weights and activations, a key of model_config.DTYPE_BYTES.
        max_num_seqs: the most requests that run at once; None: all of them.
        kv_cache_dtype: the setting with this name.
        quantization: the quantization of the weights, as for ModelConfig.weight_bytes. Integers are multiplied as 8-bit
            integers.
    """
    total_output = sum(request.num_output for request in work)
    num_steps = max((request.num_output for request in work), default=0)
    if max_num_seqs is not None:
        num_steps = max(num_steps, -(-total_output // max_num_seqs))
    arithmetic = StepArithmetic(model, dtype, quantization, kv_cache_dtype)
    # (tokens before, new tokens) of the prompts, which need not read keys and values from memory, and of the decodes.
    prompts = [(request.num_cached, request.num_prompt) for request in work]
    decoded = [(request.num_cached + request.num_prompt, max(request.num_output - 1, 0)) for request in work]
    kv_tokens = tuple(sum(kind.area(*rows) for rows in decoded) for kind in arithmetic.kinds)
    pairs = tuple(sum(kind.area(*rows) for rows in prompts + decoded) for kind in arithmetic.kinds)
    num_decoded = sum(count for _, count in decoded)
    num_tokens = num_decoded + sum(count for _, count in prompts)
    demand = arithmetic.demand(Load(num_tokens, num_decoded, total_output, kv_tokens, pairs))
    tokens_of_step = -(-total_output // max(num_steps, 1))
    num_bytes = num_steps * arithmetic.weight_bytes(tokens_of_step) + demand.kv_bytes
    num_flops = demand.linear_flops + demand.attention_flops
    by_memory = num_bytes / machine.read_bandwidth
    by_arithmetic = num_flops / machine.peak_flops + demand.linear_int8_ops / machine.peak_int8_ops
    bound = "memory" if by_memory >= by_arithmetic else "arithmetic"
    return Floor(num_bytes, num_flops, demand.linear_int8_ops, max(by_memory, by_arithmetic), bound)


def together(floors: Sequence[Floor]) -> Floor:
    """The floor of rounds that run one after the other."""
    longest = max(floors, key=lambda each: each.seconds)
    return Floor(
        sum(each.num_bytes for each in floors),
        sum(each.num_flops for each in floors),
        sum(each.num_int8_ops for each in floors),
        sum(each.seconds for each in floors),
        longest.bound,
    )


def measure_machine(dtype: str, num_threads: int) -> Machine | None:
    """Measure the present ceilings of this machine, which takes a second.

    The result is None without the compiled kernels, because they measure.

    Args:
        dtype: the dtype of the measured products, as in `floor`.
        num_threads: the number of the engine's cores. The kernels of this process keep this number of threads.
    """
    import torch

    from quire.kernels import cpu

    if not cpu.available():
        return None
    cpu.set_num_threads(num_threads)
    # the rate of 4-bit codes, which no other codes exceed
    return Machine(cpu.read_bandwidth(), cpu.peak_flops(getattr(torch, dtype)), cpu.peak_int8_ops(bits=4))
