"""`quire plan`: what a model takes in each format of weights and KV cache, and how much context fits beside it.

From config.json or a GGUF header alone: no weights are read.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.formats.kv_format import kv_format
from quire.formats.weight_format import packs_floats
from quire.model_config import ModelConfig, WeightBytes
from quire.planning.memory_plan import KvPages, MemoryFacts, bytes_for_kv_cache, length_that_starts, predict_memory
from quire.resolve import DeviceFacts, resolve, shown_bytes
from quire.settings import Resolved

# Mean KL divergence from the original in nats, of the demo model: docs/quantization.md. They order what fits: which
# format loses least. How much another model loses is to be measured.
_WEIGHTS_KL = {None: 0.0, "int8": 0.00127, "fp8": 0.00269, "int4": 0.02354}
_REDUCED_DTYPE_KL = 0.00008  # bfloat16 of a float32 checkpoint
_KV_KL = {"auto": 0.0, "int8": 0.00018, "fp8": 0.00329}


@dataclass(frozen=True)
class WeightsRow:
    """Weights in one format.

    Args:
        dtype: of activations and of what is not quantized.
        quantization: on-load, or the checkpoint's own method; None: all weights are in `dtype`.
        num_bytes: in memory, by kind.
        flags: that give it.
        tokens_per_second: of one request at most, from the memory bandwidth; None: it was not measured.
    """

    dtype: str
    quantization: str | None
    num_bytes: WeightBytes
    flags: tuple[str, ...]
    tokens_per_second: float | None

    @property
    def name(self) -> str:
        return self.quantization or self.dtype


@dataclass(frozen=True)
class Fit:
    """Weights and KV cache in one pair of formats.

    Args:
        kv_bytes_per_token: over all layers, scales included, of a token that all of them keep.
        pages: what requests take.
        num_bytes: that there are for the KV cache; negative if weights, work and reserve already take too much.
        why: that many, in numbers.
        max_model_len: of a start, which cuts -1 to what fits.
        flags: that give it.
        expected_loss: what orders formats by what they lose.
    """

    weights: WeightsRow
    kv_cache_dtype: str
    kv_bytes_per_token: int
    num_bytes: int
    why: str
    pages: KvPages
    max_model_len: int
    memory: MemoryFacts
    flags: tuple[str, ...]
    expected_loss: float

    @property
    def num_blocks(self) -> int:
        return max(self.num_bytes, 0) // self.pages.page_bytes

    @property
    def missing_bytes(self) -> int:
        """For the first block."""
        return max(self.pages.page_bytes - self.num_bytes, 0)

    @property
    def num_tokens(self) -> int:
        """In requests of max_model_len tokens each, that decode."""
        return self.pages.num_tokens(self.num_blocks, self.max_model_len)

    @property
    def num_sequences(self) -> int:
        """Of max_model_len tokens each, which share no blocks."""
        return self.pages.num_requests(self.num_blocks, self.max_model_len)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "weights": self.weights.name,
            "kv_cache_dtype": self.kv_cache_dtype,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "num_tokens": self.num_tokens,
            "max_model_len": self.max_model_len,
            "num_sequences": self.num_sequences,
            "why": self.why,
            "flags": list(self.flags),
        }


@dataclass(frozen=True)
class ModelPlan:
    """One model on one device.

    Args:
        weights: a row per format.
        fits: all pairs of formats of weights and KV cache.
        refused: formats that the model cannot have, with the reason.
        num_sequences: full contexts that are asked for.
    """

    model_name: str
    model: ModelConfig
    memory_name: str
    resolved: Resolved
    weights: list[WeightsRow]
    fits: list[Fit]
    refused: dict[str, str]
    num_sequences: int

    @property
    def best(self) -> Fit | None:
        """What loses least of all that holds the full contexts asked for; None: nothing does."""
        enough = [fit for fit in self.fits if fit.num_sequences >= self.num_sequences]
        return min(enough, key=lambda fit: fit.expected_loss, default=None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Sizes in bytes and tokens."""
        memory = self.fits[0].memory
        return {
            "name": self.model_name,
            "architecture": self.model.architecture,
            "num_parameters": self.model.num_parameters(),
            "is_exact": self.model.is_native,
            "max_model_len": self.resolved.model.max_model_len,
            "block_size": self.resolved.model.block_size,
            "device": self.resolved.device.device,
            "total_memory_bytes": memory.total_bytes,
            "work_bytes": memory.work_bytes,
            "weights": [
                {
                    "name": row.name,
                    "dtype": row.dtype,
                    "quantization": row.quantization,
                    "num_bytes": sum(row.num_bytes),
                    **{f"{kind}_bytes": count for kind, count in row.num_bytes._asdict().items()},
                    "tokens_per_second_at_most": row.tokens_per_second,
                }
                for row in self.weights
            ],
            "fits": [fit.as_dict() for fit in self.fits],
            "refused": self.refused,
            "best": None if self.best is None else self.best.as_dict(),
        }

    def text(self) -> str:
        """For people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        model = self.model
        about = "" if model.is_native else "about "
        parameters = f"{about}{model.num_parameters() / 1e6:,.1f} M parameters"
        yield f"model    {self.model_name}: {model.architecture}, {parameters}, checkpoint in {self._checkpoint()}"
        work, budget = shown_bytes(self.fits[0].memory.work_bytes), self.resolved.scheduler.max_num_batched_tokens
        requests = f"{self.resolved.scheduler.max_num_seqs:,} requests"
        share = self.resolved.device.gpu_memory_utilization
        yield f"memory   {self.memory_name}" + ("" if share is None else f", {share} of it in use")
        yield f"work     at least {work}: a step of {budget:,} tokens, logits of {requests}"
        yield ""
        yield from self._weights_table()
        yield ""
        yield from self._kv_table()
        yield ""
        yield from self._advice()

    def _weights_table(self) -> Iterator[str]:
        head = ["weights", "blocks", "output", "embeddings", "norms, biases", "together"]
        is_measured = self.weights[0].tokens_per_second is not None
        lines = []
        for row in self.weights:
            line = [row.name, *(shown_bytes(count) for count in row.num_bytes), shown_bytes(sum(row.num_bytes))]
            lines.append(line + ([_speed(row.tokens_per_second)] if row.tokens_per_second is not None else []))
        yield from _table(head + ["tokens/s of one request, at most"] * is_measured, lines)
        if self.model.tie_word_embeddings:
            yield "The embeddings are the output projection's: they are held once."
        yield from (f"{name}: {reason}" for name, reason in self.refused.items())

    def _kv_table(self) -> Iterator[str]:
        kinds = {}
        for fit in self.fits:
            kinds[kv_format(fit.kv_cache_dtype, fit.weights.dtype).name] = f"{fit.kv_bytes_per_token:,}"
        yield "KV bytes per token: " + ", ".join(f"{name} {count}" for name, count in kinds.items())
        first = self.fits[0]
        kv = kv_format(first.kv_cache_dtype, first.weights.dtype)
        yield f"Layers that keep the same, in {kv.name}:"
        yield from (f"  {line}" for line in first.pages.lines(self.resolved.model.max_model_len, kv))
        names = list(dict.fromkeys(fit.kv_cache_dtype for fit in self.fits))
        cells = {
            (fit.weights.name, fit.kv_cache_dtype): f"{fit.num_tokens:,} = {fit.num_sequences:,}" for fit in self.fits
        }
        is_cut = any(fit.max_model_len < self.resolved.model.max_model_len for fit in self.fits)
        longest = f"{'up to ' * is_cut}{self.resolved.model.max_model_len:,} tokens"
        yield f"Tokens that fit, and requests of {longest}{', cut to what fits' * is_cut}:"
        yield from _table(
            ["weights", *(f"KV {name}" for name in names)],
            [[row.name, *(cells.get((row.name, name), "-") for name in names)] for row in self.weights],
        )

    def _checkpoint(self) -> str:
        return self.model.dtype if self.model.quantized is None else self.model.quantized.describe()

    def _advice(self) -> Iterator[str]:
        longest, best = self.resolved.model.max_model_len, self.best
        if best is None:
            most = max(self.fits, key=lambda fit: (fit.num_tokens, -fit.missing_bytes))
            if not most.num_tokens:
                missing = shown_bytes(most.missing_bytes)
                yield f"best     none: {_words(most.flags)} comes closest, with {missing} missing for any KV cache"
                yield f"         {most.why}"
                return
            wanted = f"{self.num_sequences} x {longest:,} tokens"
            yield f"best     none holds {wanted}; {_words(most.flags)} holds {most.num_tokens:,} tokens"
            length = most.pages.longest(most.num_blocks // self.num_sequences)
            if length:
                yield f"         --max-model-len {length} starts, with {_words(most.flags)}"
            return
        wanted = f"{self.num_sequences} x {best.max_model_len:,} tokens"
        yield f"best     {_words(best.flags)}: loses least of what holds {wanted}"
        if best.max_model_len < longest:
            count = self.num_sequences
            whole = (fit for fit in self.fits if fit.pages.num_requests(fit.num_blocks, longest) >= count)
            other = min(whole, key=lambda fit: fit.expected_loss, default=None)
            instead = "no format holds" if other is None else f"{_words(other.flags)} holds"
            yield f"         --max-model-len -1 starts with so many; {instead} all {longest:,}"
        yield f"         {best.why}"
        if best.expected_loss:
            flags = " ".join((shlex.quote(self.model_name), *best.flags))
            yield f"         it is not the original: measure it first with `quire quality {flags} --text FILE`"


def plan(
    model_name: str,
    engine: EngineConfig,
    model: ModelConfig,
    device: DeviceFacts,
    *,
    memory_name: str,
    num_sequences: int = 1,
    read_bandwidth: float | None = None,
) -> ModelPlan:
    """The formats that `engine` leaves open, each resolved and planned as a start would.

    Args:
        memory_name: where the memory of `device` is from, for people.
        num_sequences: full contexts that the KV cache should hold.
        read_bandwidth: of all cores together, in bytes per second, if it was measured.

    Raises ConfigError for settings that contradict each other or the model.
    """
    own = resolve(engine, model, device, is_server=True)
    rows: list[WeightsRow] = []
    fits: list[Fit] = []
    refused: dict[str, str] = {}
    for dtype, quantization, weights_loss in _weight_formats(engine, model, own):
        chosen = replace(engine, dtype=dtype, quantization=quantization)
        is_own = (dtype, quantization) == (own.model.dtype, engine.quantization)
        try:
            resolved = resolve(chosen, model, device, is_server=True)
            packed = packs_floats(resolved.device.isa)
            num_bytes = model.weight_bytes_by_kind(dtype, resolved.model.quantization, is_packed=packed)
        except ConfigError as error:
            if is_own:
                raise
            refused[quantization or dtype] = error.message
            continue
        flags: tuple[str, ...] = () if is_own or quantization is None else ("--quantization", quantization)
        flags += () if dtype == own.model.dtype else ("--dtype", dtype)
        speed = None
        if read_bandwidth is not None:
            speed = read_bandwidth / model.read_bytes_per_step(dtype, resolved.model.quantization)
        row = WeightsRow(dtype, resolved.model.quantization, num_bytes, flags, speed)
        rows.append(row)
        for kv_cache_dtype, kv_loss in _kv_formats(engine):
            paired = replace(chosen, kv_cache_dtype=kv_cache_dtype)
            kv_is_own = kv_cache_dtype == engine.kv_cache_dtype
            try:
                resolved = resolve(paired, model, device, is_server=True)
            except ConfigError as error:
                if is_own and kv_is_own:
                    raise
                refused[f"{row.name} with a KV cache in {kv_cache_dtype}"] = error.message
                continue
            memory = predict_memory(resolved, model, device)
            kv_cache_bytes, why = bytes_for_kv_cache(paired, model, resolved, memory)
            fit = Fit(
                weights=row,
                kv_cache_dtype=kv_cache_dtype,
                kv_bytes_per_token=model.kv_bytes_per_token(kv_format(kv_cache_dtype, dtype)),
                num_bytes=kv_cache_bytes,
                why=why,
                pages=KvPages.of(resolved, model),
                max_model_len=resolved.model.max_model_len,
                memory=memory,
                flags=flags + (() if kv_is_own else ("--kv-cache-dtype", kv_cache_dtype)),
                expected_loss=weights_loss + kv_loss,
            )
            fits.append(replace(fit, max_model_len=length_that_starts(paired, resolved, fit.pages, fit.num_blocks)))
    return ModelPlan(model_name, model, memory_name, own, rows, fits, refused, num_sequences)


def _weight_formats(engine: EngineConfig, model: ModelConfig, own: Resolved) -> Iterator[tuple[str, str | None, float]]:
    """dtype, --quantization, and what orders them by loss: that of `engine` first."""
    yield own.model.dtype, engine.quantization, 0.0
    if engine.quantization is not None or model.quantized is not None or not model.is_native:
        return
    dtype, loss = own.model.dtype, 0.0
    if dtype == "float32" and engine.dtype == "auto":
        dtype, loss = "bfloat16", _REDUCED_DTYPE_KL
        yield dtype, None, loss
    for quantization, more in _WEIGHTS_KL.items():
        if quantization is not None:
            yield dtype, quantization, loss + more


def _kv_formats(engine: EngineConfig) -> Iterable[tuple[str, float]]:
    """--kv-cache-dtype, and what orders them by loss."""
    return [(engine.kv_cache_dtype, 0.0)] if engine.kv_cache_dtype != "auto" else _KV_KL.items()


def _words(flags: Sequence[str]) -> str:
    return " ".join(flags) or "as it is"


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines with columns of equal width: names to the left, numbers to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        yield "  ".join((line[0].ljust(widths[0]), *cells))
