"""The parts of a layer or of a model that one of several ranks holds. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from quire.layer_spec.kv_spec import KvSpec

if TYPE_CHECKING:
    from quire.layer_spec.layer import LayerSpec


@dataclass(frozen=True)
class Cut:
    """How several ranks may share a linear layer.

    Attributes:
        by: `rows`: each rank has some of the outputs, and uses only these. `joined`: each rank has some of the outputs,
            and inputs and outputs of all ranks are joined. `none`: each rank has the whole layer.
        sections: the sizes of the sections of the outputs. Each section is shared by itself. Empty: each shard is a
            section.
    """

    by: Literal["none", "rows", "joined"]
    sections: tuple[int, ...] = ()


WHOLE = Cut("none")


@dataclass(frozen=True)
class Share:
    """The part of a linear layer that one of several ranks holds: some of the outputs, with all inputs.

    Attributes:
        rows: for each shard and each rank, the rows of the checkpoint's tensor.
        tensor_rows: for each shard, the number of rows of the checkpoint's tensor. Shards with one name are parts of
            one tensor.
        inputs: the in-features that each rank has before they are joined; empty: every rank has all in-features.
    """

    rank: int
    rows: tuple[tuple[range, ...], ...]
    tensor_rows: tuple[int, ...]
    inputs: tuple[int, ...] = ()

    def own_rows(self, shard: int) -> range:
        """The rows of this rank."""
        return self.rows[shard][self.rank]

    def widths(self, shard: int) -> tuple[int, ...]:
        """The number of out-features of each rank."""
        return tuple(map(len, self.rows[shard]))


@dataclass(frozen=True)
class Placement:
    """The experts of each rank. An expert has one place or several. Places are numbered rank after rank.

    Attributes:
        experts: for each rank, the numbers of its experts, in the order of its places. No rank has an expert twice.
        columns: for each rank, the columns of the experts' results that it sums for all tokens.
        num_lanes: the number of lanes whose tokens go to these experts.
    """

    rank: int
    experts: tuple[tuple[int, ...], ...]
    columns: tuple[range, ...]
    num_lanes: int = 1

    @property
    def own(self) -> tuple[int, ...]:
        """The experts of this rank."""
        return self.experts[self.rank]

    @property
    def num_experts(self) -> int:
        """The number of experts of the layer."""
        return 1 + max(max(own) for own in self.experts)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first place of each rank, and then the number of all places."""
        return tuple(accumulate(map(len, self.experts), initial=0))

    @property
    def num_places(self) -> int:
        return self.firsts[-1]


@dataclass(frozen=True)
class Stage:
    """The part of a model that one of several stages holds: some of its layers.

    Attributes:
        index: the number of the stage. Stage 0 takes tokens; the last stage has the final norm and the output.
        layers: the numbers of its layers.
        all_layers: the layers of the whole model, because adapters name them.
        tables: the cache contents of all layers of the model, with their numbers of block tables. All stages have the
            same tables.
        streams: the residual streams that this stage keeps for a head in the last stage: see DraftHead. It gets those
            of earlier stages, and sends all of them on.
        has_embeddings: whether it holds the embeddings: the first stage, and the last one for a head without its own.
    """

    index: int
    num_stages: int
    layers: range
    all_layers: tuple[LayerSpec, ...]
    tables: tuple[tuple[KvSpec, int], ...]
    streams: tuple[int, ...]
    has_embeddings: bool

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1
