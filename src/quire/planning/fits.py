"""The formats that a model may have on one device, and the room that each pair leaves for the KV cache. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.formats.kv_format import kv_format
from quire.formats.weight_format import packs_floats
from quire.model_config import ModelConfig, WeightBytes
from quire.planning.memory_plan import KvPages, MemoryFacts, bytes_for_kv_cache, length_that_starts, predict_memory
from quire.resolve import DeviceFacts, resolve
from quire.settings import Resolved

# Mean KL divergence from the original in nats, of the demo model: docs/quantization.md. They order the formats by their
# loss. The loss of another model has to be measured.
WEIGHTS_KL = {None: 0.0, "int8": 0.00127, "fp8": 0.00269, "int4": 0.02354}
REDUCED_DTYPE_KL = 0.00008  # bfloat16 of a float32 checkpoint
KV_KL = {"auto": 0.0, "int8": 0.00018, "fp8": 0.00329}


@dataclass(frozen=True)
class WeightsForm:
    """Weights in one format.

    Args:
        dtype: the dtype of activations and of all weights that are not quantized.
        quantization: on-load, or the checkpoint's own method; None: all weights are in `dtype`.
        flags: the flags that choose it.
    """

    dtype: str
    quantization: str | None
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.quantization or self.dtype


@dataclass(frozen=True)
class Form:
    """A pair of formats of weights and KV cache, with all settings of a start.

    Args:
        flags: the flags that choose it.
        expected_loss: orders formats by their loss.
    """

    engine: EngineConfig
    weights: WeightsForm
    kv_cache_dtype: str
    resolved: Resolved
    flags: tuple[str, ...]
    expected_loss: float


@dataclass(frozen=True)
class Fit:
    """The room that a pair of formats leaves for the KV cache.

    Args:
        weight_bytes: in memory, by kind.
        kv_bytes_per_token: over all layers, scales included, of a token that all of them keep.
        pages: the pages of requests.
        num_bytes: the bytes that are left for the KV cache; negative if weights, work and reserve already
            take too much.
        why: the numbers behind `num_bytes`.
        max_model_len: the setting of a start, which cuts -1 to what fits.
    """

    form: Form
    weight_bytes: WeightBytes
    kv_bytes_per_token: int
    num_bytes: int
    why: str
    pages: KvPages
    max_model_len: int
    memory: MemoryFacts

    @property
    def num_blocks(self) -> int:
        return self.pages.num_within(self.num_bytes)

    @property
    def missing_bytes(self) -> int:
        """The bytes that are missing for the first block."""
        return max(self.pages.page_bytes - self.num_bytes, 0)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that fit, in decoding requests of max_model_len tokens each."""
        return self.pages.num_tokens(self.num_blocks, self.max_model_len)

    @property
    def num_sequences(self) -> int:
        """The number of requests of max_model_len tokens that fit. They share no blocks."""
        return self.pages.num_requests(self.num_blocks, self.max_model_len)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "weights": self.form.weights.name,
            "kv_cache_dtype": self.form.kv_cache_dtype,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "num_tokens": self.num_tokens,
            "max_model_len": self.max_model_len,
            "num_sequences": self.num_sequences,
            "why": self.why,
            "flags": list(self.form.flags),
        }


def possible_forms(engine: EngineConfig, model: ModelConfig, device: DeviceFacts) -> tuple[list[Form], dict[str, str]]:
    """The formats that `engine` leaves open: first the formats that can start, then refused formats with the reason.

    Raises ConfigError for settings that contradict each other or the model.
    """
    own = resolve(engine, model, device, is_server=True)
    forms: list[Form] = []
    refused: dict[str, str] = {}
    for dtype, quantization, weights_loss in _weight_formats(engine, model, own):
        is_own = (dtype, quantization) == (own.model.dtype, engine.quantization)
        flags: tuple[str, ...] = () if is_own or quantization is None else ("--quantization", quantization)
        flags += () if dtype == own.model.dtype else ("--dtype", dtype)
        for kv_cache_dtype, kv_loss in _kv_formats(engine):
            kv_is_own = kv_cache_dtype == engine.kv_cache_dtype
            paired = replace(engine, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
            try:
                resolved = resolve(paired, model, device, is_server=True)
                if kv_is_own:
                    model.weight_bytes(dtype, resolved.model.quantization)  # some models cannot have some formats
            except ConfigError as error:
                if is_own and kv_is_own:
                    raise
                name = quantization or dtype
                refused[name if kv_is_own else f"{name} with a KV cache in {kv_cache_dtype}"] = error.message
                if kv_is_own:
                    break
                continue
            weights = WeightsForm(dtype, resolved.model.quantization, flags)
            kv_flags = () if kv_is_own else ("--kv-cache-dtype", kv_cache_dtype)
            loss = weights_loss + kv_loss
            forms.append(Form(paired, weights, kv_cache_dtype, resolved, flags + kv_flags, loss))
    return forms, refused


def weight_bytes(form: Form, model: ModelConfig) -> WeightBytes:
    """Bytes of the weights in memory, by kind. `model`: the whole one, or the part that a device holds."""
    packed = packs_floats(form.resolved.device.isa)
    return model.weight_bytes_by_kind(form.weights.dtype, form.weights.quantization, is_packed=packed)


def fit_of(form: Form, model: ModelConfig, device: DeviceFacts, num_bytes: WeightBytes, pages: KvPages) -> Fit:
    """The room that the formats leave for the KV cache on a device.

    Args:
        model: the whole one, or the part that a device holds.
        num_bytes: bytes of its weights.
        pages: the pages that its requests take.
    """
    memory = predict_memory(form.resolved, model, device, sum(num_bytes))
    kv_cache_bytes, why = bytes_for_kv_cache(form.engine, form.resolved, memory, pages)
    fit = Fit(
        form=form,
        weight_bytes=num_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token(kv_format(form.kv_cache_dtype, form.weights.dtype)),
        num_bytes=kv_cache_bytes,
        why=why,
        pages=pages,
        max_model_len=form.resolved.model.max_model_len,
        memory=memory,
    )
    return replace(fit, max_model_len=length_that_starts(form.engine, form.resolved, pages, fit.num_blocks))


def _weight_formats(engine: EngineConfig, model: ModelConfig, own: Resolved) -> Iterator[tuple[str, str | None, float]]:
    """dtype, --quantization, and their order by loss: the settings of `engine` first."""
    yield own.model.dtype, engine.quantization, 0.0
    if engine.quantization is not None or model.quantized is not None or not model.is_native:
        return
    dtype, loss = own.model.dtype, 0.0
    if dtype == "float32" and engine.dtype == "auto":
        dtype, loss = "bfloat16", REDUCED_DTYPE_KL
        yield dtype, None, loss
    for quantization, more in WEIGHTS_KL.items():
        if quantization is not None:
            yield dtype, quantization, loss + more


def _kv_formats(engine: EngineConfig) -> Iterable[tuple[str, float]]:
    """--kv-cache-dtype, and their order by loss; the setting of `engine` first."""
    return [(engine.kv_cache_dtype, 0.0)] if engine.kv_cache_dtype != "auto" else KV_KL.items()
