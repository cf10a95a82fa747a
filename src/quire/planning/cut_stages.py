"""The layers that each stage of a pipeline holds: a stage is a model of its own, planned and loaded like any other.

Stages come one after the other. A step passes all of them, and while one computes it, others compute other steps. So
the slowest stage sets the pace, and the stage with the least memory for the KV cache sets its size. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from quire import envs
from quire.config import EngineConfig
from quire.cost.collectives import Exchanges, exchanges
from quire.distributed.layout import Grid
from quire.errors import ConfigError
from quire.formats.kv_groups import kv_groups
from quire.formats.weight_format import DTYPE_BYTES, ON_LOAD
from quire.layer_spec.cuts import Stage
from quire.layer_spec.draft_head import DraftHead
from quire.layer_spec.shapes import LinearShape
from quire.model_config import ModelConfig
from quire.planning.cut_model import ExpertCut, ModelCut, check_degree, check_division, why_not_cut


def grid_of(config: EngineConfig) -> Grid:
    """The grid of all ranks of an engine."""
    return Grid(config.tensor_parallel_size, config.pipeline_parallel_size, config.nnodes, config.num_lanes)


def check_cuts(model: ModelConfig, config: EngineConfig) -> None:
    """Raise ConfigError for degrees that the model cannot have. It names the possible degrees."""
    if config.enable_expert_parallel and not model.runs_natively(config.model_impl):
        raise ConfigError(
            f"Ranks do not share the experts of {model.architecture}: transformers' modelling code runs it, and each "
            "rank has all of its experts",
            value=config.enable_expert_parallel,
            fix="Leave --enable-expert-parallel out",
            param="enable_expert_parallel",
        )
    if config.enable_expert_parallel and not model.experts():
        raise ConfigError(
            f"{model.architecture} has no experts that ranks could share",
            value=config.enable_expert_parallel,
            fix="Leave --enable-expert-parallel out",
            param="enable_expert_parallel",
        )
    num_parts, is_native = config.tensor_parallel_size, model.runs_natively(config.model_impl)
    check_degree(model, num_parts, experts=expert_cut(model, config), is_native=is_native)
    check_division(model, num_parts, config.decode_context_parallel_size, is_native=is_native)
    stage_layers(model, config)


def expert_cut(model: ModelConfig, config: EngineConfig) -> ExpertCut | None:
    """How ranks share whole experts; None: each rank has rows of all experts, or all of them in modelling code."""
    if not config.enable_expert_parallel or not model.runs_natively(config.model_impl):
        return None
    num_redundant = config.balancing.num_redundant_experts if config.balancing else 0
    return ExpertCut(config.expert_placement_strategy, num_redundant, config.num_lanes)


def cut_of(model: ModelConfig, config: EngineConfig) -> ModelCut:
    """The parts that the ranks of a stage, or of a lane, have of a model."""
    is_native = model.runs_natively(config.model_impl)
    return ModelCut(model, config.tensor_parallel_size, expert_cut(model, config), is_native=is_native)


def exchanges_of(model: ModelConfig, config: EngineConfig, dtype: str) -> Exchanges:
    """The exchanges of all ranks in a step.

    Args:
        model: the whole model.
        dtype: the dtype of activations.
    """
    is_native, whole = model.runs_natively(config.model_impl), config.enable_expert_parallel
    return exchanges(model, grid_of(config), dtype, has_whole_experts=whole, is_native=is_native)


def part_of_rank(model: ModelConfig, config: EngineConfig, rank: int) -> ModelConfig:
    """The part of a whole model that a rank holds."""
    grid = grid_of(config)
    part = cut_of(model, config).part(grid.place(rank), grid.lane(rank))
    if grid.num_stages == 1:
        return part
    index, tables = grid.stage(rank), tuple((group.spec, group.num_tables) for group in kv_groups(part))
    layers = stage_layers(model, config)[index]
    own = part.layers[layers.start : layers.stop]
    is_last, streams = index == grid.num_stages - 1, tuple[int, ...]()
    if (head := _head_of(part)) is not None:  # the stream after the last layer is the last stage's too
        streams = tuple(layer for layer in head.streams if is_last or layer < layers.stop)
    has_embeddings = index == 0 or (is_last and _lends_embeddings(part))
    stage = Stage(index, grid.num_stages, layers, part.layers, tables, streams, has_embeddings)
    return replace(part, layers=own, stage=stage, drafter=part.drafter if is_last else None)


def _head_of(model: ModelConfig) -> DraftHead | None:
    return None if model.drafter is None else model.drafter.head


def _lends_embeddings(model: ModelConfig) -> bool:
    """Whether a head uses the model's embeddings."""
    head = _head_of(model)
    return head is not None and not head.owns_embeddings


def stage_layers(model: ModelConfig, config: EngineConfig) -> list[range]:
    """The layers of each stage. Raises ConfigError."""
    num_stages, given = config.pipeline_parallel_size, envs.PP_LAYER_PARTITION.get()
    if num_stages == 1:
        return [range(model.num_layers)]
    if not model.runs_natively(config.model_impl):
        raise _impossible(config, "transformers' modelling code runs it, and runs all layers at once", (1,))
    if not 1 <= num_stages <= model.num_layers:
        raise _impossible(config, f"it has {model.num_layers} layers", range(1, model.num_layers + 1))
    sizes = given or _balanced(_costs(model, config), num_stages)
    if len(sizes) != num_stages or sum(sizes) != model.num_layers or min(sizes) < 1:
        raise ConfigError(
            "The stages of the pipeline are not the layers of the model",
            value=",".join(map(str, sizes)),
            expected=f"{num_stages} positive numbers that add up to {model.num_layers}",
            fix=f"Unset {envs.PP_LAYER_PARTITION.name} to have layers shared by bytes and predicted time",
            param=envs.PP_LAYER_PARTITION.name,
        )
    stops = list(accumulate(sizes))
    return [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _impossible(config: EngineConfig, why: str, legal: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"The model cannot be cut into {config.pipeline_parallel_size} stages: {why}",
        value=config.pipeline_parallel_size,
        expected=f"{legal[0]} to {legal[-1]}" if len(legal) > 1 else str(legal[0]),
        param="pipeline_parallel_size",
    )


class _Costs:
    """Shares that contiguous layers have of all bytes, and of the time of a step, which reads the weights of one token.

    Args:
        layers: the bytes held and the bytes read of each layer.
        first: the same for the parts before the layers, and `last` for the parts after them.
    """

    def __init__(self, layers: Iterable[tuple[int, int]], first: tuple[int, int], last: tuple[int, int]) -> None:
        held, read = zip(*layers, strict=True)
        self.num_layers = len(held)
        self._sums = [[0, *accumulate(each)] for each in (held, read)]
        self._first, self._last = first, last
        self._totals = [sums[-1] + first[kind] + last[kind] for kind, sums in enumerate(self._sums)]

    def of(self, start: int, stop: int) -> float:
        """The larger of both shares."""
        shares: list[float] = []
        for kind, sums in enumerate(self._sums):
            own = sums[stop] - sums[start]
            own += self._first[kind] if start == 0 else 0
            own += self._last[kind] if stop == self.num_layers else 0
            shares.append(own / max(self._totals[kind], 1))
        return max(shares)


def _costs(model: ModelConfig, config: EngineConfig) -> _Costs:
    quantization = config.quantization if config.quantization in ON_LOAD and model.quantized is None else None
    dtype = model.dtype if model.dtype in DTYPE_BYTES else "bfloat16"

    @cache
    def num_bytes(linear: LinearShape) -> int:
        return sum(part.num_bytes(dtype, is_packed=True) for part in model.stored(linear, quantization))

    drafter = _drafter_bytes(model, config, quantization, dtype)
    layers = [
        (sum(map(num_bytes, layer.linears())), sum(map(num_bytes, layer.active_linears()))) for layer in model.layers
    ]
    output, embeddings = num_bytes(model.output_linear()), num_bytes(model.embeddings())
    if _lends_embeddings(model) and not model.tie_word_embeddings:
        drafter += embeddings
    return _Costs(layers, (embeddings, 0), (output + drafter, output))


def _drafter_bytes(model: ModelConfig, config: EngineConfig, quantization: str | None, dtype: str) -> int:
    """The bytes of the drafter, which the last stage holds. While it drafts, all stages wait: its time is nobody's."""
    if (drafter := model.drafter) is None:
        return 0
    num_bytes = drafter.weight_bytes(dtype, None if drafter.quantized is not None else quantization)
    num_ranks = config.tensor_parallel_size
    is_cut = drafter.is_shared and why_not_cut(drafter, num_ranks) is None
    return num_bytes if is_cut else num_bytes * num_ranks


def _balanced(costs: _Costs, num_stages: int) -> list[int]:
    """The layers of each stage. The largest share is as small as possible, and then the sum of squares of shares."""
    best: list[tuple[float, float, list[int]]] = [
        (costs.of(0, stop), costs.of(0, stop) ** 2, [stop]) for stop in range(costs.num_layers + 1)
    ]
    for stage in range(1, num_stages):
        longer = []
        for stop in range(costs.num_layers + 1):
            options = []
            for start in range(stage, stop):
                most, squares, sizes = best[start]
                own = costs.of(start, stop)
                options.append((max(most, own), squares + own**2, [*sizes, stop - start]))
            longer.append(min(options, default=(float("inf"), 0.0, [])))
        best = longer
    return best[costs.num_layers][2]
