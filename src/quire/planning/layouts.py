"""Divides a model over several devices: the part of each rank, and the room that each layout leaves. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from quire.config import EngineConfig
from quire.cost.collectives import Exchanges, exchanges
from quire.cost.model import CostModel
from quire.cost.step_time import StepTime
from quire.distributed.layout import Grid
from quire.errors import ConfigError
from quire.formats.kv_format import RANGE_POSITIONS, kv_format
from quire.model_config import ModelConfig
from quire.planning.cut_model import MOST_DEGREES, legal_degrees, legal_divisions
from quire.planning.cut_stages import check_cuts, cut_of, expert_cut, grid_of, part_of_rank
from quire.planning.estimate import Estimate, table
from quire.planning.fits import Form, fit_of, possible_forms, weight_bytes
from quire.planning.memory_plan import KvPages, planned_weight_bytes
from quire.planning.step_costs import decode_step, exchanges_text
from quire.resolve import DeviceFacts, shown_bytes
from quire.settings import Resolved

ONE_DEVICE: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "nnodes": 1,
    "enable_expert_parallel": False,
    "enable_eplb": False,
    "eplb_config": None,
    "distributed_executor_backend": None,
}


@dataclass(frozen=True)
class RankShare:
    """The part of each rank, for neighbours in a stage and on a node that hold the same amount.

    Args:
        grid: the grid of all ranks.
        layers: the layers of the stage.
        num_experts: the number of whole experts of a layer; 0: it has rows of all experts, or there are no experts.
        has_drafter: whether it has the model that drafts, or a part of it. Then sizes include it.
    """

    grid: Grid
    ranks: range
    layers: range
    num_experts: int
    has_drafter: bool
    weight_bytes: int
    kv_bytes_per_token: int

    @property
    def node(self) -> int:
        return self.grid.node(self.ranks[0])

    @property
    def stage(self) -> int:
        return self.grid.stage(self.ranks[0])

    def text(self) -> str:
        """For people."""
        first, last = self.ranks[0], self.ranks[-1]
        who = f"rank {first}" if first == last else f"ranks {first} to {last}, each"
        where = f"stage {self.stage}, " if self.grid.num_stages > 1 else ""
        where = f"node {self.node}, {where}" if self.grid.num_nodes > 1 else where
        experts = f"{self.num_experts} experts of a layer, " if self.num_experts else ""
        drafter = "the drafter, " if self.has_drafter else ""
        return (
            f"{who}: {where}layers {self.layers[0]} to {self.layers[-1]}, {experts}{drafter}"
            f"weights {shown_bytes(self.weight_bytes)}, KV {self.kv_bytes_per_token:,} bytes per token"
        )

    def as_dicts(self) -> list[dict[str, Any]]:
        """An object for each rank, for JSON."""
        return [
            {
                "rank": rank,
                "node": self.node,
                "stage": self.stage,
                "layers": [self.layers[0], self.layers[-1]],
                "num_experts": self.num_experts,
                "has_drafter": self.has_drafter,
                "weight_bytes": self.weight_bytes,
                "kv_bytes_per_token": self.kv_bytes_per_token,
            }
            for rank in self.ranks
        ]


def rank_shares(model: ModelConfig, engine: EngineConfig, resolved: Resolved) -> tuple[RankShare, ...]:
    """Each rank's part of the model, in its formats, with the drafter. Raises ConfigError for illegal degrees."""
    check_cuts(model, engine)
    grid, form = grid_of(engine), resolved.model
    kv = kv_format(form.kv_cache_dtype, form.dtype)

    def share(rank: int) -> tuple[int, tuple[range, int, bool, int, int]]:
        part = part_of_rank(model, engine, rank)
        layers = range(model.num_layers) if part.stage is None else part.stage.layers
        experts = (each.num_experts for each in part.experts() if each.placement is not None)
        kv_bytes = part.kv_bytes_per_token(kv) // engine.decode_context_parallel_size
        kv_bytes += 0 if resolved.drafter is None else resolved.drafter.kv_bytes_per_token(part)
        weight_bytes, has_drafter = planned_weight_bytes(resolved, part), part.drafter is not None
        return grid.node(rank), (layers, next(experts, 0), has_drafter, weight_bytes, kv_bytes)

    found = []
    for (_, held), ranks in groupby(range(grid.size), share):
        first, *others = ranks
        found.append(RankShare(grid, range(first, first + len(others) + 1), *held))
    return tuple(found)


@dataclass(frozen=True)
class Layout:
    """A way to share devices among copies, stages and ranks of a model.

    Args:
        context: the number of ranks that divide a KV cache.
        has_whole_experts: whether ranks have whole experts, and not rows of all. Several copies share them, as lanes.
        weight_bytes: bytes of the weights of the rank that holds the most.
        num_tokens: the tokens that the KV caches of all copies hold; 0: the weights do not fit.
        step: the predicted step with one token of one request, which goes through all stages; None: there are no
            speeds.
        exchanges: what the ranks exchange in a step.
    """

    form: Form
    tensor: int
    pipeline: int
    copies: int
    context: int
    has_whole_experts: bool
    weight_bytes: int
    num_tokens: int
    step: StepTime | None
    exchanges: Exchanges

    @property
    def flags(self) -> str:
        """The flags of `quire serve`."""
        degrees = (
            ("-tp", self.tensor),
            ("-pp", self.pipeline),
            ("-dp", self.copies),
            ("-dcp", self.context),
        )
        words = [f"{flag} {degree}" for flag, degree in degrees if degree > 1] + ["-ep"] * self.has_whole_experts
        return " ".join(words) or "one device"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "weights": self.form.weights.name,
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "data_parallel_size": self.copies,
            "decode_context_parallel_size": self.context,
            "enable_expert_parallel": self.has_whole_experts,
            "weight_bytes": self.weight_bytes,
            "num_tokens": self.num_tokens,
            "token_seconds": None if self.step is None else Estimate(*self.step[:3]).as_dict(),
            "bound": None if self.step is None else self.step.bound,
            "num_exchanges": self.exchanges.near.count + self.exchanges.far.count,
            "num_exchanges_between_machines": self.exchanges.far.count,
        }


# Gives the cost model of ranks with this part of the model, and their exchanges.
CostOfRanks = Callable[[Form, ModelConfig, Exchanges], CostModel]


def layouts(
    form: Form,
    model: ModelConfig,
    device: DeviceFacts,
    count: int,
    num_nodes: int = 1,
    cost_of: CostOfRanks | None = None,
) -> Iterator[Layout]:
    """All legal ways to share `count` devices in one pair of formats. Ways with the most ranks in a stage come first.

    Args:
        device: what each rank has.
        num_nodes: machines with as many devices each.
        cost_of: None: there are no speeds.
    """
    for tensor in range(count, 0, -1):
        for pipeline in range(1, count // tensor + 1):
            copies, rest = divmod(count, tensor * pipeline)
            machines = _machines(tensor, pipeline, copies, count, num_nodes)
            if rest or not machines:
                continue
            may_be_whole = (tensor > 1 and (copies == 1 or pipeline == 1)) or (pipeline == 1 and copies > 1)
            may_be_whole = may_be_whole and model.runs_natively(form.engine.model_impl)
            for whole in (False, True) if may_be_whole and model.experts() else (False,):
                engine = replace(
                    form.engine,
                    tensor_parallel_size=tensor,
                    pipeline_parallel_size=pipeline,
                    data_parallel_size=copies if whole else 1,
                    enable_expert_parallel=whole,
                )
                try:
                    parts = [part_of_rank(model, engine, rank) for rank in range(0, tensor * pipeline, tensor)]
                except ConfigError:  # the model cannot be cut so
                    continue
                num_lanes = copies if whole else 1
                grid = Grid(tensor, pipeline, machines if num_lanes == 1 else num_nodes, num_lanes)
                is_native = model.runs_natively(engine.model_impl)
                between = exchanges(
                    model, grid, form.resolved.model.dtype, has_whole_experts=whole, is_native=is_native
                )
                step = None
                if cost_of is not None:
                    step = decode_step(cost_of(form, cut_of(model, engine).part(), between), 1)
                for context in _legal_divisions(model, engine):
                    resolved = _divided(form.resolved, context)
                    fits = [
                        fit_of(form, part, device, weight_bytes(form, part), KvPages.of(resolved, part))
                        for part in parts
                    ]
                    least = min(fits, key=lambda fit: fit.num_blocks)
                    most = max(sum(fit.weight_bytes) for fit in fits)
                    num_tokens = copies * least.num_tokens
                    yield Layout(form, tensor, pipeline, copies, context, whole, most, num_tokens, step, between)


def _machines(tensor: int, pipeline: int, copies: int, count: int, num_nodes: int) -> int:
    """The machines of a copy; 0: machines cannot have equal parts of it. See config_rules."""
    num_local, num_ranks = count // num_nodes, tensor * pipeline
    if num_ranks <= num_local:
        return int(num_local % num_ranks == 0)
    machines, rest = divmod(num_ranks, num_local)
    has_whole_stages, is_whole = pipeline % machines == 0, machines % pipeline == 0
    is_legal = has_whole_stages or (is_whole and tensor % (machines // pipeline) == 0)
    return machines if is_legal and not rest and copies == 1 else 0


def _legal_divisions(model: ModelConfig, engine: EngineConfig) -> list[int]:
    """The numbers of parts into which ranks can divide a KV cache."""
    if engine.num_lanes > 1:
        return [1]
    return legal_divisions(model, engine.tensor_parallel_size, is_native=model.runs_natively(engine.model_impl))


def _divided(resolved: Resolved, num_owners: int) -> Resolved:
    """The settings of ranks that have the KV cache together."""
    if num_owners == 1:
        return resolved
    form = replace(resolved.model, block_size=RANGE_POSITIONS, decode_context_parallel_size=num_owners)
    return replace(resolved, model=form)


@dataclass(frozen=True)
class LayoutPlan:
    """A model on several devices.

    Args:
        engine: a config with the degrees that were asked for.
        memory_name: the memory of each rank, for people.
        rows: in all formats of the weights. With speeds, the fastest way for one request is the first of its format.
        links: the links that are assumed, for people; empty: there are no speeds.
    """

    model_name: str
    model: ModelConfig
    engine: EngineConfig
    memory_name: str
    shares: tuple[RankShare, ...]
    rows: list[Layout]
    links: str = ""

    @property
    def asked(self) -> list[Layout]:
        """The layout that was asked for, in each format."""
        engine = self.engine
        degrees = (engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size)
        whole = engine.enable_expert_parallel and engine.tensor_parallel_size * engine.num_lanes > 1
        wanted = (*degrees, engine.decode_context_parallel_size, whole)
        found = ((row.tensor, row.pipeline, row.copies, row.context, row.has_whole_experts) for row in self.rows)
        return [row for row, each in zip(self.rows, found, strict=True) if each == wanted]

    @property
    def exit_code(self) -> int:
        """The exit code. 0: the layout fits in some format; 2: it fits in none."""
        return 0 if any(row.num_tokens for row in self.asked) else 2

    check_code = exit_code

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Sizes in bytes and tokens."""
        return {
            "name": self.model_name,
            "ranks": [entry for share in self.shares for entry in share.as_dicts()],
            "legal_tensor_parallel_sizes": self._degrees(),
            "legal_decode_context_parallel_sizes": self._divisions(),
            "most_stages": self._most_stages(),
            "layouts": [row.as_dict() for row in self.rows],
            "asked": [row.as_dict() for row in self.asked],
        }

    def text(self) -> str:
        """For people."""
        return "\n".join(self._lines())

    def _degrees(self) -> list[int]:
        experts, is_native = expert_cut(self.model, self.engine), self.model.runs_natively(self.engine.model_impl)
        return legal_degrees(self.model, MOST_DEGREES, experts, is_native=is_native)

    def _divisions(self) -> list[int]:
        return _legal_divisions(self.model, self.engine)

    def _most_stages(self) -> int:
        return self.model.num_layers if self.model.runs_natively(self.engine.model_impl) else 1

    def _lines(self) -> Iterator[str]:
        first = self.asked[0]
        parameters = f"{self.model.num_parameters() / 1e6:,.1f} M parameters"
        yield f"model    {self.model_name}: {self.model.architecture}, {parameters}"
        yield f"memory   {self.memory_name}"
        yield f"ranks    {first.flags}, weights in {first.form.weights.name}"
        yield from (f"         {share.text()}" for share in self.shares)
        degrees = ", ".join(map(str, self._degrees()))
        divisions = ", ".join(map(str, self._divisions()))
        tensor = self.engine.tensor_parallel_size
        stages = f"1 to {most}" if (most := self._most_stages()) > 1 else "1"
        yield f"degrees  -tp {degrees}; -pp {stages}; -dcp {divisions} with -tp {tensor}"
        if self.links:
            yield f"links    {self.links}"
            yield f"         {exchanges_text(first.exchanges)} in a step of the layout that was asked for"
        yield ""
        head = ["layout", "weights", "of the largest rank", "KV tokens of all copies"]
        yield from table(head + ["ms per token of one request"] * bool(self.links), map(_cells, self.rows), num_names=2)
        yield "A request passes all stages, so -pp makes no answer faster; -tp does, and -dp serves more requests."
        if self.links:
            yield "Ways in one format are in the order of their speed, with exchanges. Speeds of devices are assumed."
        if any(row.has_whole_experts and row.copies > 1 for row in self.rows):
            yield "With -dp and -ep, copies are lanes of one engine and share the experts; without -ep, each has all."


def _cells(row: Layout) -> list[str]:
    cells = [row.flags, row.form.weights.name, shown_bytes(row.weight_bytes), _tokens(row.num_tokens)]
    return cells if row.step is None else [*cells, (Estimate(*row.step[:3]) * 1e3).text(row.step.bound)]


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "does not fit"


def lay_out(
    model_name: str,
    engine: EngineConfig,
    model: ModelConfig,
    device: DeviceFacts,
    memory_name: str,
    cost_of: CostOfRanks | None = None,
    links: str = "",
) -> LayoutPlan:
    """Compare all ways to share as many devices as `engine` asks for. Raises ConfigError for illegal degrees.

    Args:
        device: what each rank has.
        cost_of: see layouts.
        links: see LayoutPlan.
    """
    check_cuts(model, engine)
    alone = replace(engine.undivided(), **ONE_DEVICE)
    forms, _ = possible_forms(alone, model, device)
    forms = [form for form in forms if form.kv_cache_dtype == engine.kv_cache_dtype]
    count = engine.num_ranks * engine.num_replicas
    rows = []
    for form in forms:
        found = layouts(form, model, device, count, engine.nnodes, cost_of)
        rows += sorted(found, key=lambda row: row.step.seconds if row.step is not None else 0.0)
    shares = rank_shares(model, engine, forms[0].resolved)
    return LayoutPlan(model_name, model, engine, memory_name, shares, rows, links)
