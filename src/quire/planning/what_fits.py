"""`quire plan`: the memory of a model in each format of weights and KV cache, and the context that fits beside it.

From config.json or a GGUF header alone: no weights are read.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig
from quire.cost.step_time import StepTime
from quire.formats.kv_format import kv_format
from quire.layer_spec.feed_forward import distinct_experts
from quire.model_config import ModelConfig, WeightBytes
from quire.planning.estimate import Estimate, table
from quire.planning.fits import Fit, WeightsForm, fit_of, possible_forms, weight_bytes
from quire.planning.memory_plan import KvPages
from quire.planning.step_costs import KnownCost, decode_step
from quire.resolve import DeviceFacts, shown_bytes
from quire.settings import Resolved
from quire.speculative_config import SUFFIX_SHARED_BYTES

STEPS = (1, 8, 32)  # tokens of steps whose experts are shown


@dataclass(frozen=True)
class WeightsRow:
    """Weights in one format.

    Args:
        num_bytes: in memory, by kind.
        expert_bytes: bytes of the largest expert of a layer; 0: there are none.
        step: the predicted step of one request in a short context; None: the speed of the device is not known.
    """

    form: WeightsForm
    num_bytes: WeightBytes
    expert_bytes: int
    step: StepTime | None


@dataclass(frozen=True)
class ModelPlan:
    """One model on one device.

    Args:
        weights: a row per format.
        fits: all pairs of formats of weights and KV cache.
        refused: formats that the model cannot have, with the reason.
        num_sequences: full contexts that are asked for.
        speed_origin: the origin of the predicted speeds, for people; empty: there are none.
    """

    model_name: str
    model: ModelConfig
    memory_name: str
    resolved: Resolved
    weights: list[WeightsRow]
    fits: list[Fit]
    refused: dict[str, str]
    num_sequences: int
    speed_origin: str

    @property
    def best(self) -> Fit | None:
        """The pair with the least loss that holds the wanted full contexts; None: no pair does."""
        enough = [fit for fit in self.fits if fit.num_sequences >= self.num_sequences]
        return min(enough, key=lambda fit: fit.form.expected_loss, default=None)

    @property
    def exit_code(self) -> int:
        """0: something fits; 2: nothing does."""
        return 0 if self.best is not None else 2

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Sizes in bytes and tokens."""
        memory = self.fits[0].memory
        return {
            "name": self.model_name,
            "architecture": self.model.architecture,
            "num_parameters": self.model.num_parameters(),
            "num_active_parameters": self.model.num_active_parameters(),
            "experts": [
                {
                    "num_layers": num_layers,
                    "num_experts": num_experts,
                    "num_active": num_active,
                    "hits": {str(rows): distinct_experts(num_experts, num_active, rows) for rows in STEPS},
                }
                for (num_experts, num_active), num_layers in self.model.expert_counts().items()
            ],
            "is_exact": self.model.is_native,
            "max_model_len": self.resolved.model.max_model_len,
            "block_size": self.resolved.model.block_size,
            "device": self.resolved.device.device,
            "total_memory_bytes": memory.total_bytes,
            "work_bytes": memory.work_bytes,
            "lora_bytes": memory.lora_bytes,
            "weights": [
                {
                    "name": row.form.name,
                    "dtype": row.form.dtype,
                    "quantization": row.form.quantization,
                    "num_bytes": sum(row.num_bytes),
                    **{f"{kind}_bytes": count for kind, count in row.num_bytes._asdict().items()},
                    "expert_bytes": row.expert_bytes,
                    "tokens_per_second": None if row.step is None else _per_second(row.step).as_dict(),
                    "bound": None if row.step is None else row.step.bound,
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
        if model.experts():
            parameters += f" ({model.num_active_parameters() / 1e6:,.1f} M active)"
        checkpoint = model.describe_checkpoint()
        yield f"model    {self.model_name}: {model.architecture}, {parameters}, checkpoint in {checkpoint}"
        work, budget = shown_bytes(self.fits[0].memory.work_bytes), self.resolved.scheduler.max_num_batched_tokens
        requests = f"{self.resolved.scheduler.max_num_seqs:,} requests"
        share = self.resolved.device.gpu_memory_utilization
        for (num_experts, num_active), num_layers in model.expert_counts().items():
            hits = (f"{distinct_experts(num_experts, num_active, rows):.3g} at {rows}" for rows in STEPS)
            yield f"experts  {num_layers} layers of {num_experts}, {num_active} active per token; a step hits in each,"
            yield f"         if all are equally likely, at these numbers of tokens: {', '.join(hits)}"
        yield f"memory   {self.memory_name}" + ("" if share is None else f", {share} of it in use")
        at_least = "" if self.resolved.device.device == "cpu" else "at least "  # a GPU has graphs too
        yield f"work     {at_least}{work}: a step of {budget:,} tokens, logits of {requests}"
        if (lora := self.resolved.lora) is not None:
            size = shown_bytes(self.fits[0].memory.lora_bytes)
            yield f"adapters {size} of work, at most: {lora.max_cpu_loras} of rank {lora.max_rank}, and one in exchange"
        if (speculation := self.resolved.scheduler.speculation) is not None:
            own = {
                "ngram": ", without weights and KV cache of their own",
                "suffix": f", with up to {shown_bytes(SUFFIX_SHARED_BYTES)} of main memory for the answers of others",
            }.get(speculation.method, "")
            if (drafter := self.resolved.drafter) is not None:
                weights = shown_bytes(drafter.weight_bytes(model, self.resolved.device.isa))
                own = f", with weights of {weights} and {drafter.kv_bytes_per_token(model):,} bytes of KV per token"
            yield f"drafts   {speculation.method}, at most {speculation.num_speculative_tokens} tokens a step{own}"
        yield ""
        yield from self._weights_table()
        yield ""
        yield from self._kv_table()
        yield ""
        yield from self._advice()

    def _weights_table(self) -> Iterator[str]:
        head = ["weights", "blocks", "output", "embeddings", "norms, biases", "together"]
        has_experts = bool(self.model.experts())
        head += ["one expert"] * has_experts
        is_known = self.weights[0].step is not None
        lines = []
        for row in self.weights:
            line = [row.form.name, *(shown_bytes(count) for count in row.num_bytes), shown_bytes(sum(row.num_bytes))]
            line += [shown_bytes(row.expert_bytes)] * has_experts
            lines.append(line + ([_per_second(row.step).text(), row.step.bound] if row.step is not None else []))
        yield from table(head + ["tokens/s of one request", "bound by"] * is_known, lines)
        if self.speed_origin:
            yield f"Speed: {self.speed_origin}."
        if self.model.tie_word_embeddings:
            yield "The embeddings are the output projection's: they are held once."
        yield from (f"{name}: {reason}" for name, reason in self.refused.items())

    def _kv_table(self) -> Iterator[str]:
        kinds = {}
        for fit in self.fits:
            kinds[kv_format(fit.form.kv_cache_dtype, fit.form.weights.dtype).name] = f"{fit.kv_bytes_per_token:,}"
        yield "KV bytes per token: " + ", ".join(f"{name} {count}" for name, count in kinds.items())
        first = self.fits[0]
        kv = kv_format(first.form.kv_cache_dtype, first.form.weights.dtype)
        yield f"Layers that keep the same, in {kv.name}:"
        yield from (f"  {line}" for line in first.pages.lines(self.resolved.model.max_model_len, kv))
        names = list(dict.fromkeys(fit.form.kv_cache_dtype for fit in self.fits))
        cells = {
            (fit.form.weights.name, fit.form.kv_cache_dtype): f"{fit.num_tokens:,} = {fit.num_sequences:,}"
            for fit in self.fits
        }
        is_cut = any(fit.max_model_len < self.resolved.model.max_model_len for fit in self.fits)
        longest = f"{'up to ' * is_cut}{self.resolved.model.max_model_len:,} tokens"
        yield f"Tokens that fit, and requests of {longest}{', cut to what fits' * is_cut}:"
        yield from table(
            ["weights", *(f"KV {name}" for name in names)],
            [[row.form.name, *(cells.get((row.form.name, name), "-") for name in names)] for row in self.weights],
        )

    def _advice(self) -> Iterator[str]:
        longest, best = self.resolved.model.max_model_len, self.best
        if best is None:
            most = max(self.fits, key=lambda fit: (fit.num_tokens, -fit.missing_bytes))
            if not most.num_tokens:
                missing = shown_bytes(most.missing_bytes)
                yield f"best     none: {_words(most.form.flags)} comes closest, with {missing} missing for any KV cache"
                yield f"         {most.why}"
                return
            wanted = f"{self.num_sequences} x {longest:,} tokens"
            yield f"best     none holds {wanted}; {_words(most.form.flags)} holds {most.num_tokens:,} tokens"
            length = most.pages.longest(most.num_blocks // self.num_sequences)
            if length:
                yield f"         --max-model-len {length} starts, with {_words(most.form.flags)}"
            return
        wanted = f"{self.num_sequences} x {best.max_model_len:,} tokens"
        yield f"best     {_words(best.form.flags)}: loses least of what holds {wanted}"
        if best.max_model_len < longest:
            count = self.num_sequences
            whole = (fit for fit in self.fits if fit.pages.num_requests(fit.num_blocks, longest) >= count)
            other = min(whole, key=lambda fit: fit.form.expected_loss, default=None)
            instead = "no format holds" if other is None else f"{_words(other.form.flags)} holds"
            yield f"         --max-model-len -1 starts with that length; {instead} all {longest:,}"
        yield f"         {best.why}"
        if best.form.expected_loss:
            flags = " ".join((shlex.quote(self.model_name), *best.form.flags))
            yield f"         it is not the original: measure it first with `quire quality {flags} --text FILE`"


def plan(
    model_name: str,
    engine: EngineConfig,
    model: ModelConfig,
    device: DeviceFacts,
    *,
    memory_name: str,
    num_sequences: int = 1,
    cost_of: Callable[[Resolved], KnownCost] | None = None,
) -> ModelPlan:
    """The formats that `engine` leaves open, each resolved and planned as a start would.

    Args:
        memory_name: the origin of the memory of `device`, for people.
        num_sequences: full contexts that the KV cache should hold.
        cost_of: the cost model with some settings; None: the speed of the device is not known.

    Raises ConfigError for settings that contradict each other or the model.
    """
    forms, refused = possible_forms(engine, model, device)
    rows: dict[WeightsForm, WeightsRow] = {}
    fits, origins = [], []
    for form in forms:
        if form.weights not in rows:
            known = None if cost_of is None else cost_of(form.resolved)
            step = None if known is None else decode_step(known.cost, 1)
            of_experts = model.expert_bytes(form.weights.dtype, form.weights.quantization)
            largest = max((num_bytes for _, num_bytes in of_experts), default=0)
            rows[form.weights] = WeightsRow(form.weights, weight_bytes(form, model), largest, step)
            origins += [] if known is None else [known.origin]
        pages = KvPages.of(form.resolved, model)
        fits.append(fit_of(form, model, device, rows[form.weights].num_bytes, pages))
    weights, origin = list(rows.values()), "; ".join(dict.fromkeys(origins))
    return ModelPlan(model_name, model, memory_name, forms[0].resolved, weights, fits, refused, num_sequences, origin)


def _per_second(step: StepTime) -> Estimate:
    return Estimate(1 / step.seconds, 1 / step.high, 1 / step.low)


def _words(flags: Sequence[str]) -> str:
    return " ".join(flags) or "as it is"
