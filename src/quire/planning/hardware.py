"""Machines to plan for: this one, GPUs of the table by name, or one that numbers describe. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire import extension
from quire.cost.devices import GPUS, NOT_RUN_ON, Ceilings, Gpu, find_gpu, runnable_names
from quire.errors import ConfigError
from quire.planning import devices
from quire.planning.devices import LEAST_CAPABILITY
from quire.resolve import DeviceFacts, GpuFacts, shown_bytes

MOST_DEVICES = 1024


def this_machine(device: str) -> DeviceFacts:
    """The facts that an engine with this --device would find here. A process of its own looks for a GPU."""
    gpu = "none was looked for" if device == "cpu" else devices.ask_gpu()
    return devices.detect(extension.chosen_isa(), gpu)


@dataclass(frozen=True)
class Hardware:
    """Some devices of one kind.

    Args:
        facts: the facts of a machine that has one of these devices.
        described: given rates; None: rates of `gpu`, or this machine's own.
        read_bandwidth: the read bandwidth of this machine's memory, in bytes per second, if it was measured.
        price_per_hour: the price per hour of one device.
        origin: the origin of its memory and its rates, for people.
    """

    name: str
    count: int
    facts: DeviceFacts
    gpu: Gpu | None = None
    described: Ceilings | None = None
    read_bandwidth: float | None = None
    price_per_hour: float | None = None
    origin: str = ""

    @property
    def is_known(self) -> bool:
        """Whether its rates are described, so that nothing is measured here."""
        return self.gpu is not None or self.described is not None

    @property
    def memory_bytes(self) -> int:
        """The bytes of memory of one device."""
        return self.facts.memory_of("cuda" if self.facts.gpu is not None else "cpu")[0]

    def ceilings(self, is_fp8: bool = False) -> Ceilings:
        """The peak rates of the device by its description, for weights in FP8 or others."""
        if self.gpu is not None:
            return self.gpu.ceilings(is_fp8)
        assert self.described is not None, "this machine is measured"
        return self.described

    def text(self) -> str:
        """For people."""
        each = " each" * (self.count > 1)
        parts = [shown_bytes(self.memory_bytes) + each]
        if self.is_known:
            rates = self.ceilings()
            parts += [f"{rates.read_bandwidth / 1e9:,.0f} GB/s", f"{rates.flops / 1e12:,.0f} Tflop/s"]
        if self.gpu is not None and self.gpu.aws:
            parts.append(f"AWS {self.gpu.aws}")
        if self.price_per_hour is not None:
            parts.append(f"{self.price_per_hour:g} per hour{each}")
        return f"{self.name}: {', '.join(parts)} ({self.origin})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = self.ceilings() if self.is_known else None
        return {
            "name": self.name,
            "count": self.count,
            "memory_bytes": self.memory_bytes,
            "read_bandwidth": None if rates is None else rates.read_bandwidth,
            "flops": None if rates is None else rates.flops,
            "price_per_hour": self.price_per_hour,
            "aws": "" if self.gpu is None else self.gpu.aws,
            "source": self.origin if self.gpu is None else self.gpu.source,
        }


def listed(gpu: Gpu, count: int, here: DeviceFacts, price_per_hour: float | None = None) -> Hardware:
    """GPUs of the table, in machines that are else like this one. Raises ConfigError for devices without kernels."""
    if gpu.capability < LEAST_CAPABILITY:
        major, minor = divmod(gpu.capability, 10)
        raise ConfigError(
            f"Quire does not run on {gpu.name}: its compute capability is {major}.{minor}, and the kernels need 8.0 "
            "for bfloat16 in tensor cores",
            expected="one of " + ", ".join(runnable_names()),
            param="hardware",
        )
    facts = GpuFacts(gpu.cuda_name, gpu.capability, gpu.memory_bytes, gpu.memory_bytes, count)
    name = gpu.name if count == 1 else f"{gpu.name}x{count}"
    return Hardware(name, count, replace(here, gpu=facts), gpu, price_per_hour=price_per_hour, origin="data sheet")


def parse_hardware(text: str, here: DeviceFacts, prices: Sequence[float]) -> list[Hardware]:
    """Read a text such as `h100x2,l40s`.

    Raises ConfigError for an unknown name or count, and if there is neither one price nor one price for each device.
    """
    words = [word.strip() for word in text.split(",")]
    if len(prices) > 1 and len(prices) != len(words):
        raise ConfigError(
            "The number of prices differs from the number of devices",
            value=list(prices),
            expected=f"one price, or one for each of {', '.join(words)}",
            param="price_per_hour",
        )
    every: Sequence[float | None] = list(prices) * len(words) if len(prices) == 1 else prices or [None] * len(words)
    return [listed(*_gpu_and_count(word), here, price) for word, price in zip(words, every, strict=True)]


def next_larger(hardware: Hardware) -> Hardware | None:
    """The same number of the next larger GPUs of the table, with at least a quarter more memory; None: there are none.

    It has no price, because another GPU has another price.
    """
    larger = (
        gpu
        for gpu in GPUS.values()
        if gpu.capability >= LEAST_CAPABILITY and gpu.memory_bytes > 1.25 * hardware.memory_bytes
    )
    gpu = min(larger, key=lambda gpu: (gpu.memory_bytes, -gpu.read_bandwidth), default=None)
    return None if gpu is None else listed(gpu, hardware.count, hardware.facts)


def _gpu_and_count(word: str) -> tuple[Gpu, int]:
    """The GPU and the count in a word. A name may end like a count (rtx4090), so the whole word is tried first."""
    name, times, number = word.rpartition("x")
    if not times or not number.isdecimal() or not name:
        return find_gpu(word), 1
    if name.lower() in NOT_RUN_ON:
        return find_gpu(name), 1  # it raises an error that says why
    try:
        return find_gpu(word), 1
    except ConfigError:
        gpu, count = find_gpu(name), int(number[:9])
    if not 1 <= count <= MOST_DEVICES:
        raise ConfigError(
            "Illegal number of devices", value=word, expected=f"1 to {MOST_DEVICES}, as h100x2", param="hardware"
        )
    return gpu, count
