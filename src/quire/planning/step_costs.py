"""The cost model of a model in its settings on this machine: calibrated by an earlier start, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache

from quire import extension
from quire.cost.arithmetic import Load, StepArithmetic
from quire.cost.calibrate import FEW_STEPS_SPREAD, Fit
from quire.cost.collectives import NO_EXCHANGES, NO_LINKS, Exchanges, Link, Links
from quire.cost.devices import (
    NETWORK,
    SHARED_MEMORY,
    Ceilings,
    cpu_ceilings,
    cuda_ceilings,
    gpu_link,
    gpu_named,
)
from quire.cost.model import CostModel
from quire.cost.step_time import StepTime, prior
from quire.cost.store import CalibrationFile
from quire.errors import ConfigError
from quire.model_config import ModelConfig
from quire.planning.knee import REACHED_BANDWIDTH, REACHED_FLOPS, described_constants
from quire.private_cache import cache_folder, code_identity, digest
from quire.resolve import DeviceFacts, GpuFacts
from quire.settings import Record, Resolved, Setting

EARLIER_START = "an earlier start measured steps"  # origin of constants, for people
SHORT_CONTEXT = 16  # tokens before, of each request that a rate is expected for
DESCRIBED_SPREAD = 1.0  # nine of ten steps are taken to lie between half of the prediction and twice it


def step_arithmetic(resolved: Resolved, model: ModelConfig, exchanges: Exchanges = NO_EXCHANGES) -> StepArithmetic:
    """The bytes and operations of a model's steps in its settings. See StepArithmetic."""
    form = resolved.model
    return StepArithmetic(model, form.dtype, form.quantization, form.kv_cache_dtype, resolved.device.isa, exchanges)


def calibration_file(
    resolved: Resolved, model: ModelConfig, device: DeviceFacts, exchanges: Exchanges = NO_EXCHANGES
) -> CalibrationFile:
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
            *([asdict(exchanges)] if exchanges else []),
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


def assumed_fit(reached: Ceilings, links: Links = NO_LINKS) -> Fit:
    """Constants before anything was measured; their interval is wide."""
    return Fit(replace(prior(reached.read_bandwidth, reached.flops), links=links), FEW_STEPS_SPREAD)


def known_cost(
    resolved: Resolved,
    model: ModelConfig,
    device: DeviceFacts,
    read_bandwidth: float | None = None,
    exchanges: Exchanges = NO_EXCHANGES,
) -> KnownCost:
    """The cost model on this machine: an earlier start has measured it, or it is assumed."""
    arithmetic = step_arithmetic(resolved, model, exchanges)
    fit = calibration_file(resolved, model, device, exchanges).read()
    if fit is not None:
        return KnownCost(CostModel(arithmetic, fit), EARLIER_START, True)
    measured = "" if read_bandwidth is None else f" from {read_bandwidth / 1e9:.1f} GB/s, measured now"
    links = links_between(device.gpu if resolved.device.device == "cuda" else None)
    assumed = CostModel(arithmetic, assumed_fit(ceilings(resolved, arithmetic, device, read_bandwidth), links))
    return KnownCost(assumed, f"assumed{measured}; a start measures steps", False)


def links_between(gpu: GpuFacts | None, network: Link | None = None) -> Links:
    """The links that are assumed: between CPUs or GPUs of one machine, and between machines.

    Args:
        network: the link between machines, if it is described.
    """
    return Links(SHARED_MEMORY if gpu is None else gpu_link(gpu.name), network or NETWORK)


def described_cost(
    arithmetic: StepArithmetic, described: Ceilings, *, is_gpu: bool, links: Links = NO_LINKS
) -> KnownCost:
    """The cost model on a device that is only described."""
    constants = replace(described_constants(arithmetic, described, is_gpu=is_gpu), links=links)
    cost = CostModel(arithmetic, Fit(constants, DESCRIBED_SPREAD))
    return KnownCost(
        cost, f"assumed: {REACHED_BANDWIDTH:.0%} of the bandwidth, {REACHED_FLOPS:.0%} of the operations", False
    )


def exchanges_text(exchanges: Exchanges) -> str:
    """What ranks exchange in a step with one token, for people."""
    parts = []
    for name, traffic in (("in a machine", exchanges.near), ("between machines", exchanges.far)):
        if traffic.count:
            kilobytes = traffic.num_bytes(1, 1, 0) / 1e3
            parts.append(
                f"{traffic.count:,} exchange{'s' * (traffic.count > 1)} {name} of {kilobytes:,.1f} kB together"
            )
    return " and ".join(parts) or "no exchanges"


def links_text(exchanges: Exchanges, links: Links) -> str:
    """What exchanges cost, for people."""
    parts = []
    for name, traffic, link in (
        ("in a machine", exchanges.near, links.near),
        ("between machines", exchanges.far, links.far),
    ):
        if traffic.count:
            parts.append(f"{name} {link.text()}" if any(link) else f"{name} not measured apart from the step")
    return ", ".join(parts)


def decode_step(cost: CostModel, count: int) -> StepTime:
    """The time of a step of `short_decodes`."""
    return cost.predict(short_decodes(cost, count))


def short_decodes(cost: CostModel, count: int) -> Load:
    """One token of each of `count` requests in short contexts."""
    return cost.arithmetic.load([SHORT_CONTEXT] * count, [1] * count, count)
