"""`quire plan [MODEL ...]`: bytes per format, requests that fit, and the speed of hardware on a workload.

Loads no weights.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import __version__
from quire.cli.flags import Parser
from quire.cli.settings import add_settings_flags, read_settings
from quire.compat.table import as_flag, flag_words
from quire.config import EngineConfig
from quire.cost.collectives import Exchanges, Link
from quire.cost.devices import NETWORK, Ceilings
from quire.errors import ConfigError
from quire.model_config import ModelConfig
from quire.option import options, parse_duration, parse_human_int
from quire.resolve import DeviceFacts, GpuFacts, shown_bytes

if TYPE_CHECKING:
    from quire.cost.model import CostModel
    from quire.planning.fits import Form

DESCRIPTION = """
Prints the bytes of weights and KV cache in every format, and how many tokens fit beside the weights, from config.json
or a GGUF header. With --hardware, or with a workload, a rate, times or a price, it ranks hardware, formats and devices
per copy, and predicts times and rates. --quantization, --dtype and --kv-cache-dtype leave only what they name; all
other flags are the flags of `serve`.
"""
EPILOG = """
Exit code: 0; 2 if a model fits in no format; with --check also 1 if the best row does not meet what is asked.
"""
_MOST_MEMORY = 1 << 60  # bytes
_OTHER_GPU = 90  # the compute capability that is planned for a GPU on another machine
# With any of these flags, candidates are ranked.
_RANKED_BY = ("hardware", "workload", "request_rate", "price_per_hour", "tensor_parallel_size")
# A number outside these bounds is a mistake, and sums of such numbers are infinite.
LEAST_RATE, MOST_RATE, MOST_PRICE = 1e-9, 1e21, 1e12
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="show what models take in each format, what fits into memory, and how fast hardware serves a workload",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    add("--hardware", metavar="LIST", help="GPUs to rank, as h100x2,l40s: docs/planning.md lists them")
    add("--memory", metavar="SIZE", help="plan for this much memory, as 80GiB: RAM, or, with --device cuda, a GPU's")
    add("--bandwidth", metavar="RATE", help="with --memory: bytes per second that are read, as 864GB")
    add("--flops", metavar="RATE", help="with --memory: operations per second in bfloat16, as 362T")
    add("--interconnect", metavar="RATE[,TIME]", help="between --nnodes: a rate, and a time: 10Gbit/s,0.03ms")
    add("--sequences", type=int, metavar="N", help="requests of max_model_len to hold (default: 1)")
    add("--workload", metavar="W", help="chat, rag, code, random:IN/OUT, or a file of requests (default: chat)")
    add("--request-rate", metavar="N", help="requests per second that all copies together should serve")
    add("--price-per-hour", metavar="PRICE", help="of one device; or one for each of --hardware: 2.5,0.8")
    add("--check", action="store_true", help="exit code 0 only if the best row meets the workload, its rate and times")
    add_settings_flags(parser, (EngineConfig,), models="*")
    parser.set_defaults(run=partial(run, parser))


# Settings that a row has of its own, and goals of the plan.
_DECIDED = {
    *("model", "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "enable_eplb", "eplb_config"),
    *("slo_ttft", "slo_itl"),
}
_ASKS = ("sequences", "workload", "request_rate", "price_per_hour")  # wishes for a row, beside --check and targets


def run(parser: Parser, args: argparse.Namespace) -> int:
    """Returns the exit code: 0; 2 if a model fits in no format; with --check, 1 if a demand is not met."""
    is_ranked = args.check or any(getattr(args, name, None) is not None for name in _RANKED_BY)
    names = args.model_tag
    args.model_tag = None
    engine, _ = read_settings(parser, args)
    # Without --hardware, the degrees say how many devices there are.
    has_ranks = engine.tensor_parallel_size * engine.num_lanes > 1
    is_laid_out = engine.pipeline_parallel_size > 1 or (has_ranks and args.hardware is None)
    degree = None if engine.sources["tensor_parallel_size"] == "default" else engine.tensor_parallel_size
    is_ranked = is_ranked or engine.slo_ttft is not None or engine.slo_itl is not None
    asks = args.check or engine.slo_ttft is not None or engine.slo_itl is not None
    if is_laid_out and (asks or any(getattr(args, name) is not None for name in _ASKS)):
        raise ConfigError(
            "Ways to share a model between ranks are compared by memory and the time of one token alone",
            fix="Leave out --check, --sequences, targets, workload, rate and price; or leave out -pp, and -tp without "
            "--hardware",
        )
    if not is_laid_out:  # of a row
        engine = replace(
            engine.undivided(),
            tensor_parallel_size=1,
            enable_expert_parallel=False,
            enable_eplb=False,
            eplb_config=None,
        )
    if names and engine.model is not None:
        raise ConfigError("Models are named twice", value=[*names, engine.model], fix="Leave --model out")
    if args.sequences is not None and args.sequences < 1:
        raise ConfigError("Too few sequences", value=args.sequences, expected="1 or more", param="sequences")
    if args.interconnect is not None and not (is_laid_out and engine.nnodes > 1):
        raise ConfigError(
            "Only one machine is planned",
            value=args.interconnect,
            fix="Give --nnodes and -tp or -pp too; or leave --interconnect out",
            param="interconnect",
        )
    machine = _Machine(args, engine)
    plans: list[Any] = []
    from quire.entry.launch import find_model

    for model_name in names or [engine.model]:
        config = replace(engine, model=model_name)
        folder, name, model = find_model(config, None, weights=False)
        if is_laid_out:
            plans += _laid_out(config, name, model, machine, args)
        elif is_ranked:
            plans.append(_ranked(args, config, folder, name, model, machine, degree))
        else:
            plans.append(_plain(args, config, name, model, machine))
    if args.json:
        print(json.dumps({"version": __version__, "models": [each.as_dict() for each in plans]}, indent=2))
    else:
        print("\n\n".join(each.text() for each in plans))
    return int(max(each.check_code if args.check else each.exit_code for each in plans))


class _Machine:
    """The machine for the models: this machine, or one that --memory, --bandwidth and --flops describe."""

    def __init__(self, args: argparse.Namespace, engine: EngineConfig) -> None:
        from quire import extension
        from quire.planning.hardware import this_machine
        from quire.planning.replicas import share_of_machine

        _check_description(args, engine)
        is_elsewhere = args.hardware is not None or (engine.device == "cuda" and args.memory is not None)
        self.facts = this_machine("cpu" if is_elsewhere else engine.device)
        self.read_bandwidth: float | None = None
        self.described: Ceilings | None = None
        if args.hardware is not None:
            self.memory_name = ""
        elif args.memory is not None:
            self.facts, self.memory_name = _with_memory(self.facts, engine.device, _memory_bytes(args.memory))
            if args.bandwidth is not None:
                self.described = Ceilings(_rate(args.bandwidth, "bandwidth"), _rate(args.flops, "flops"))
        else:
            uses_gpu = self.facts.gpu is not None and engine.device != "cpu"
            self.read_bandwidth = None if uses_gpu else extension.read_bandwidth(self.facts.num_cores)
            total, free = self.facts.memory_of("cuda" if uses_gpu else "cpu")
            self.memory_name = f"{shown_bytes(free)} free now of {shown_bytes(total)}"
        if args.hardware is None and engine.num_local_replicas > 1:
            self.facts = share_of_machine(self.facts, engine)
            if self.read_bandwidth is not None:
                self.read_bandwidth /= engine.num_local_replicas
            self.memory_name += f", for each of {engine.num_local_replicas} replicas"
        self.has_speed = args.memory is None or self.described is not None
        self.is_gpu = self.facts.gpu is not None and engine.device != "cpu"


def _plain(args: argparse.Namespace, engine: EngineConfig, name: str, model: ModelConfig, machine: _Machine) -> Any:
    from quire.planning.step_costs import KnownCost, described_cost, known_cost, step_arithmetic
    from quire.planning.what_fits import plan
    from quire.settings import Resolved

    def cost_of(resolved: Resolved) -> KnownCost:
        if machine.described is not None:
            return described_cost(
                step_arithmetic(resolved, model), machine.described, is_gpu=resolved.device.device == "cuda"
            )
        return known_cost(resolved, model, machine.facts, machine.read_bandwidth)

    return plan(
        name,
        engine,
        model,
        machine.facts,
        memory_name=machine.memory_name,
        num_sequences=1 if args.sequences is None else args.sequences,
        cost_of=cost_of if machine.has_speed else None,
    )


def _laid_out(
    engine: EngineConfig, name: str, model: ModelConfig, machine: _Machine, args: argparse.Namespace
) -> Iterator[Any]:
    """A plan for each kind of device: all ways to share the number of devices that the degrees need."""
    from quire.planning.hardware import parse_hardware
    from quire.planning.layouts import lay_out

    network = _network(args.interconnect)
    if engine.nnodes > 1 and (args.hardware is not None or machine.is_gpu):
        raise ConfigError(
            "GPUs of several machines cannot share a model in this version",
            value=engine.nnodes,
            expected="1",
            fix="Leave --nnodes out, or use --device cpu",
            param="nnodes",
        )
    if args.hardware is None:
        num_local = engine.num_local_ranks  # the machine was shared by replicas before
        facts = machine.facts if machine.is_gpu else machine.facts.shared_by(num_local)
        ranks = _RanksOf(facts, network, machine.described, machine.read_bandwidth, 1 if machine.is_gpu else num_local)
        memory = f"{machine.memory_name}, shared by {num_local} ranks"
        speeds = (ranks.cost, ranks.links_text(engine)) if machine.has_speed else (None, "")
        yield lay_out(name, engine, model, facts, memory, *speeds)
        return
    for each in parse_hardware(args.hardware, machine.facts, []):
        ranks = _RanksOf(each.facts, network)
        yield lay_out(name, engine, model, each.facts, each.text(), ranks.cost, ranks.links_text(engine))


class _RanksOf:
    """The assumed speeds of ranks.

    Args:
        facts: what each rank has.
        network: None: the usual one is assumed.
        described: the rates of a machine or a GPU; None: those of the table or of this machine.
        read_bandwidth: of this machine, in bytes per second, if it was measured.
        num_sharing: the ranks that share these rates.
    """

    def __init__(
        self,
        facts: DeviceFacts,
        network: Link | None,
        described: Ceilings | None = None,
        read_bandwidth: float | None = None,
        num_sharing: int = 1,
    ) -> None:
        from quire.planning.step_costs import links_between

        self._facts, self._network, self._links = facts, network, links_between(facts.gpu, network)
        self._described = described and Ceilings(described.read_bandwidth / num_sharing, described.flops / num_sharing)
        self._read_bandwidth = read_bandwidth and read_bandwidth / num_sharing

    def cost(self, form: Form, part: ModelConfig, exchanges: Exchanges) -> CostModel:
        """See layouts.CostOfRanks."""
        from quire.cost.model import CostModel
        from quire.planning.step_costs import assumed_fit, ceilings, described_cost, step_arithmetic

        arithmetic, is_gpu = step_arithmetic(form.resolved, part, exchanges), form.resolved.device.device == "cuda"
        if self._described is None and not is_gpu:
            rates = ceilings(form.resolved, arithmetic, self._facts, self._read_bandwidth)
            return CostModel(arithmetic, assumed_fit(rates, self._links))
        rates = self._described or ceilings(form.resolved, arithmetic, self._facts)
        return described_cost(arithmetic, rates, is_gpu=is_gpu, links=self._links).cost

    def links_text(self, engine: EngineConfig) -> str:
        """What is assumed of links, for people."""
        near, far = (link.text() for link in self._links)
        if engine.nnodes == 1:
            return f"in a machine {near} (assumed)"
        origin = "assumed" if self._network is None else "--interconnect"
        return f"in a machine {near} (assumed), between {engine.nnodes} machines {far} ({origin})"


def _network(text: str | None) -> Link | None:
    """The link in a text such as `1.25GB`, `10Gbit/s`, `12.5GB/s,0.01ms`. Raises ConfigError."""
    if text is None:
        return None
    rate, _, seconds = text.partition(",")
    rate, latency = rate.strip(), NETWORK.per_exchange
    if re.search(r"b(/s)?$", rate):  # networks are named in bits, and memory in bytes
        raise ConfigError(
            "A lower-case b of --interconnect may stand for bits or for bytes",
            value=text,
            expected="bits as 10Gbit/s, or bytes as 1.25GB/s",
            param="interconnect",
        )
    bits = re.fullmatch(r"([\d.]+\s*[kmgtp]?)bit(/s)?", rate, re.IGNORECASE)
    if seconds:
        try:
            latency = parse_duration(seconds.strip())
        except ConfigError as error:
            raise ConfigError(
                "Illegal --interconnect",
                value=text,
                expected="a rate, and perhaps the time of a small exchange: 10Gbit/s,0.03ms",
                param="interconnect",
            ) from error
    num_bytes = _rate(rate, "interconnect") if bits is None else _rate(bits[1], "interconnect") / 8
    return Link(latency, 1 / num_bytes)


def _ranked(
    args: argparse.Namespace,
    engine: EngineConfig,
    folder: Path,
    name: str,
    model: ModelConfig,
    machine: _Machine,
    degree: int | None,
) -> Any:
    from quire.planning.candidate_lines import RankedPlan
    from quire.planning.candidates import Candidates, Demand
    from quire.planning.hardware import Hardware, parse_hardware
    from quire.planning.service import Goals

    prices = _prices(args.price_per_hour)
    if args.hardware is not None:
        hardware = parse_hardware(args.hardware, machine.facts, prices)
    elif len(prices) > 1:
        raise ConfigError(
            "There are several prices for one machine", value=prices, expected="one", param="price_per_hour"
        )
    else:
        if not machine.has_speed:
            raise ConfigError(
                "A machine with --memory has no speed of its own",
                fix="Give --bandwidth and --flops too, or name it with --hardware",
                param="memory",
            )
        label, price = "this machine" if args.memory is None else "as described", prices[0] if prices else None
        hardware = [
            Hardware(
                label,
                1,
                machine.facts,
                described=machine.described,
                read_bandwidth=machine.read_bandwidth,
                price_per_hour=price,
                origin=machine.memory_name,
            )
        ]
    rate = None if args.request_rate is None else _rate(args.request_rate, "request_rate")
    goals = Goals(rate, engine.slo_ttft, engine.slo_itl)
    demand = Demand(_lengths(args, engine, folder), goals, args.sequences)
    # The share of this machine is one device; the other shares are its copies.
    is_asked = args.hardware is not None and engine.sources["data_parallel_size"] != "default"
    copies = engine.data_parallel_size if is_asked else None
    found = Candidates(engine, model, hardware, demand, degree, copies)
    return RankedPlan(name, model, hardware, found, _given_flags(engine))


def _given_flags(engine: EngineConfig) -> dict[str, list[str]]:
    """The flags of `quire serve` that were given and that no row decides, with their values."""
    names = [f.name for f in options(EngineConfig) if not f.metadata["secret"] and f.name not in _DECIDED]
    words = (flag_words(name, getattr(engine, name)) for name in names if engine.sources[name] == "flag")
    return {flag: values for flag, *values in words}


def _lengths(args: argparse.Namespace, engine: EngineConfig, folder: Path) -> Any:
    from quire.entry.launch import read_tokenizer
    from quire.measure.workload import named_workload, request_lengths
    from quire.planning.request_lengths import RequestLength, RequestLengths

    chosen = args.workload or "chat"
    found = request_lengths(named_workload(chosen), lambda: read_tokenizer(engine, folder))
    return RequestLengths(chosen, [RequestLength(*each) for each in found])


def _check_description(args: argparse.Namespace, engine: EngineConfig) -> None:
    """Raise ConfigError for flags of a machine that contradict each other."""
    if args.hardware is not None and (args.memory or args.bandwidth or args.flops):
        raise ConfigError(
            "--hardware names a machine, but --memory, --bandwidth and --flops describe one too",
            fix="Leave one of the two out",
            param="hardware",
        )
    if args.hardware is not None and engine.device == "cpu":
        raise ConfigError("--hardware lists GPUs", value="--device cpu", fix="Leave --device out", param="hardware")
    if (args.bandwidth is None) != (args.flops is None) or (args.bandwidth is not None and args.memory is None):
        raise ConfigError(
            "A machine is described by --memory, --bandwidth and --flops together",
            fix="Give all three: --memory 48GiB --bandwidth 864GB --flops 362T",
            param="bandwidth",
        )


def _rate(text: str, name: str) -> float:
    """The number in a text such as `864GB`, `3.35TB/s`, `362T`, `989 TFLOPS` or `12.5`. Raises ConfigError.

    Args:
        name: the setting, for the message.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmgtp]?)(b|flops?)?(/s)?", text.strip(), re.IGNORECASE)
    value = float(match[1]) * _FACTORS[match[2].lower()] if match else 0.0
    if not LEAST_RATE <= value <= MOST_RATE:
        examples = {
            "bandwidth": "as 864GB or 3.35TB/s",
            "flops": "as 362T",
            "interconnect": "as 10Gbit/s, 1.25GB/s or 12.5GB,0.01ms",
        }.get(name, "as 10 or 0.5")
        raise ConfigError(
            f"Illegal {as_flag(name)}",
            value=text,
            expected=f"{LEAST_RATE:g} to {MOST_RATE:g} per second, {examples}",
            param=name,
        )
    return value


def _prices(text: str | None) -> list[float]:
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    prices = [float(word) if re.fullmatch(r"\d+\.?\d*|\.\d+", word) else 0.0 for word in words]
    if not all(0 < price <= MOST_PRICE for price in prices):
        raise ConfigError(
            "Illegal --price-per-hour",
            value=text,
            expected=f"a price of one device up to {MOST_PRICE:g}, as 2.5, or one for each of --hardware, as 2.5,0.8",
            param="price_per_hour",
        )
    return prices


def _memory_bytes(text: str) -> int:
    """The bytes in a text: `80GiB` and `80G` stand for powers of 1024, `80GB` and `80g` for powers of 1000."""
    plain = text.strip()
    if plain[-3:] in ("GiB", "MiB"):
        plain = plain[:-2]
    elif plain[-2:] in ("GB", "MB"):
        plain = plain[:-2] + plain[-2].lower()
    num_bytes = 0
    with suppress(ConfigError):
        num_bytes = parse_human_int(plain)
    if not 1 <= num_bytes <= _MOST_MEMORY:
        expected = "a positive size up to an exbibyte, such as 80GiB or 80GB"
        raise ConfigError("Illegal size of memory", value=text, expected=expected, param="memory")
    return num_bytes


def _with_memory(device: DeviceFacts, wanted: str, num_bytes: int) -> tuple[DeviceFacts, str]:
    """The machine with other memory, which is all free. If `wanted` is cuda, it has a GPU that this machine lacks."""
    if wanted == "cuda" or (wanted == "auto" and device.gpu is not None):
        gpu = device.gpu or GpuFacts("a GPU that is not here", _OTHER_GPU, num_bytes, num_bytes)
        gpu = replace(gpu, total_memory_bytes=num_bytes, free_memory_bytes=num_bytes)
        return replace(device, gpu=gpu), f"{shown_bytes(num_bytes)} (--memory) on a GPU"
    return (
        replace(device, total_memory_bytes=num_bytes, free_memory_bytes=num_bytes),
        f"{shown_bytes(num_bytes)} (--memory)",
    )
