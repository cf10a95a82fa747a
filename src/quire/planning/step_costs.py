"""The cost model of a model in its settings on this machine: calibrated by an earlier start, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from quire import extension
from quire.cost.arithmetic import StepArithmetic
from quire.cost.calibrate import FEW_STEPS_SPREAD, Fit
from quire.cost.devices import Ceilings, cpu_ceilings, cuda_ceilings, gpu_named
from quire.cost.model import CostModel
from quire.cost.step_time import StepTime, prior
from quire.cost.store import CalibrationFile
from quire.errors import ConfigError
from quire.model_config import ModelConfig
from quire.planning.knee import REACHED_BANDWIDTH, REACHED_FLOPS, described_constants
from quire.private_cache import cache_folder, code_identity, digest
from quire.resolve import DeviceFacts
from quire.settings import Record, Resolved, Setting

EARLIER_START = "an earlier start measured steps"  # origin of constants, for people
SHORT_CONTEXT = 16  # tokens before, of each request that a rate is expected for
DESCRIBED_SPREAD = 1.0  # nine of ten steps are taken to lie between half of the prediction and twice it


def step_arithmetic(resolved: Resolved, model: ModelConfig) -> StepArithmetic:
    """The bytes and operations of a model's steps in its settings."""
    form = resolved.model
    return StepArithmetic(model, form.dtype, form.quantization, form.kv_cache_dtype, resolved.device.isa)


def calibration_file(resolved: Resolved, model: ModelConfig, device: DeviceFacts) -> CalibrationFile:
    """The store of measurements of starts with these settings."""
    form, place = resolved.model, resolved.device
    key = {
        "machine": [device.name, place.isa, place.num_threads, *([device.gpu.name] if device.gpu else [])],
        "build": _build(),
        "model": digest(repr(replace(model, model="", max_model_len=0))),
        "form": [
            *(form.dtype, form.quantization, form.kv_cache_dtype, form.block_size, form.model_impl),
            *([form.decode_context_parallel_size] if form.decode_context_parallel_size > 1 else []),
        ],
        "steps": [
            place.attention_backend,
            place.deterministic,
            place.cudagraph_mode,
            list(place.cudagraph_capture_sizes),
            place.max_cudagraph_capture_size,
            resolved.scheduler.depth,
            resolved.scheduler.pipeline_parallel_size,
        ],
    }
    folder = None
    with suppress(ConfigError):  # without a home every start measures
        folder = cache_folder("calibrations", "calibrations")
    return CalibrationFile(folder, key)


@cache
def _build() -> str:
    """A key that changes when Quire changes. It is made once, because it reads every file and is asked for often."""
    return code_identity(*([extension.C.__file__] if extension.is_used() else []))


@dataclass(frozen=True)
class KnownCost:
    """A cost model, and where its constants are from, for people."""

    cost: CostModel
    origin: str
    is_measured: bool


def ceilings(
    resolved: Resolved, arithmetic: StepArithmetic, device: DeviceFacts, read_bandwidth: float | None = None
) -> Ceilings:
    """The peak rates of the device.

    Args:
        read_bandwidth: in bytes per second, if it was measured.
    """
    if resolved.device.device == "cuda" and device.gpu is not None:
        return cuda_ceilings(device.gpu.name, arithmetic.is_fp8)
    assumed = cpu_ceilings(resolved.device.isa, resolved.device.num_threads)
    return assumed if read_bandwidth is None else replace(assumed, read_bandwidth=read_bandwidth)


def peaks(
    resolved: Resolved,
    arithmetic: StepArithmetic,
    device: DeviceFacts,
    num_ranks: int,
    measured: Ceilings | None = None,
) -> Mapping[str, Setting]:
    """The ceilings of all ranks together, by name, with their source; none of a device that the table does not have.

    Args:
        measured: what all ranks together have measured; None: they have not.
    """
    record, place = Record(), resolved.device
    is_known = device.gpu is not None and gpu_named(device.gpu.name) is not None
    what = f"{place.num_threads} threads of {place.isa}" if place.device == "cpu" else "the GPU by its data sheet"
    if num_ranks > 1:
        what = f"{num_ranks} ranks, each with {what}"
    if measured is not None:
        record.put("peak_flops", measured.flops, "measured", what)
        record.put("peak_read_bandwidth", measured.read_bandwidth, "measured", what)
    elif place.device == "cpu" or is_known:
        assumed, detail = ceilings(resolved, arithmetic, device), f"assumed for {what}, not measured"
        record.put("peak_flops", num_ranks * assumed.flops, "formula", detail)
        record.put("peak_read_bandwidth", num_ranks * assumed.read_bandwidth, "formula", detail)
    return record


def assumed_fit(reached: Ceilings) -> Fit:
    """Constants before anything was measured; their interval is wide."""
    return Fit(prior(reached.read_bandwidth, reached.flops), FEW_STEPS_SPREAD)


def known_cost(
    resolved: Resolved, model: ModelConfig, device: DeviceFacts, read_bandwidth: float | None = None
) -> KnownCost:
    """The cost model on this machine: an earlier start has measured it, or it is assumed."""
    arithmetic = step_arithmetic(resolved, model)
    fit = calibration_file(resolved, model, device).read()
    if fit is not None:
        return KnownCost(CostModel(arithmetic, fit), EARLIER_START, True)
    measured = "" if read_bandwidth is None else f" from {read_bandwidth / 1e9:.1f} GB/s, measured now"
    assumed = CostModel(arithmetic, assumed_fit(ceilings(resolved, arithmetic, device, read_bandwidth)))
    return KnownCost(assumed, f"assumed{measured}; a start measures steps", False)


def described_cost(arithmetic: StepArithmetic, described: Ceilings, *, is_gpu: bool) -> KnownCost:
    """The cost model on a device that is only described."""
    constants = described_constants(arithmetic, described, is_gpu=is_gpu)
    cost = CostModel(arithmetic, Fit(constants, DESCRIBED_SPREAD))
    return KnownCost(
        cost, f"assumed: {REACHED_BANDWIDTH:.0%} of the bandwidth, {REACHED_FLOPS:.0%} of the operations", False
    )


def decode_step(cost: CostModel, count: int) -> StepTime:
    """The time of a step with one token of each of `count` requests in short contexts."""
    return cost.predict(cost.arithmetic.load([SHORT_CONTEXT] * count, [1] * count, count))
