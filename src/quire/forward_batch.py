"""Every tensor that a layer may read in one forward pass. It is passed down the model and never global.

Dimensions: T tokens of this step, S sequences of this step, M blocks in the longest table,
B blocks, G kv heads, P block size, E head dim, C rows a worker holds, N block tables of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from quire import _C


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer: keys and values [num_blocks, num_kv_heads, block_size, head_dim].

    A block of a layer is contiguous.
    With latent attention, values are a view of the beginnings of the keys. The cache holds the model's dtype, or codes
    of 8 bits (float8_e4m3fn, float8_e5m2, int8). int8 codes have a float32 scale per token and KV head, in the same
    blocks: [num_blocks, num_kv_heads, block_size]. Blocks of other layers lie between the blocks of a layer.
    """

    k_BGPE: Tensor
    v_BGPE: Tensor
    k_scales_BGP: Tensor | None = None
    v_scales_BGP: Tensor | None = None
    table: int = 0  # index in ForwardBatch.tables of the table with its blocks
    compiled: _C.KvCache | None = field(default=None, init=False, repr=False, compare=False)
    """The CPU kernels' form of this cache. They make it at their first call."""

    @property
    def is_latent(self) -> bool:
        """Whether values are the beginnings of keys."""
        return self.v_BGPE.data_ptr() == self.k_BGPE.data_ptr()

    def tensors(self) -> list[Tensor]:
        """All tensors of the layer. The first dimension of each is the block."""
        tensors = (self.k_BGPE, self.v_BGPE, self.k_scales_BGP, self.v_scales_BGP)
        return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True, slots=True)
class HostStep:
    """The host's view of a GPU step, for backends that plan the step on the host. It is valid until the next step."""

    rows_S: NDArray[np.int64]  # the rows of block_tables
    query_lens_S: NDArray[np.int64]
    seq_lens_S: NDArray[np.int64]  # after this step
    block_tables_NCM: NDArray[np.int32]  # every block table, with all rows
    padded_rows: int | None  # number of rows of a captured step; the rows after the step's own compute nothing


@dataclass(frozen=True, slots=True)
class LaneRows:
    """The tokens of each of L lanes in a step. Lanes have their own requests and share experts."""

    counts: tuple[int, ...]
    begins_L1: Tensor  # int32, L + 1 prefix sums

    @classmethod
    def of(cls, counts: Sequence[int]) -> LaneRows | None:
        """The tokens of all lanes in a step; None: there is one lane."""
        if len(counts) == 0:
            return None
        return cls(tuple(counts), torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32))


@dataclass(slots=True)
class StepTable:
    """The places of a step's tokens in the cache, for the layers with one block table."""

    slot_mapping_T: Tensor  # int64: block_id * block_size + offset
    block_tables_SM: Tensor  # int32


@dataclass(slots=True)
class ForwardBatch:
    """The packed rows of one step. Sequence s has the tokens cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1.

    The query tokens of a sequence are its last positions: if its length is L and its query length Q, token i is at
    position L - Q + i.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64: rows of the rotary table; long sequences under longrope add an offset to positions
    cu_seqlens_q_S1: Tensor  # int32, S + 1 prefix sums
    seq_lens_S: Tensor  # int32, KV length after this step
    tables: tuple[StepTable, ...]
    caches: list[LayerCache]  # one per layer
    adapter_slots_T: Tensor | None = None  # int32, -1: no adapter (kernels.lora); None: no row of the step has one
    host: HostStep | None = None  # None: on CPU, or if the step was prepared already
    # What a head that drafts reads beside the tokens, or the residual stream that a stage gets. A pass may write to it.
    hidden_TD: Tensor | None = None
    lanes: LaneRows | None = None  # None: there is one lane

    @classmethod
    def without_rows(cls, lanes: LaneRows) -> ForwardBatch:
        """The batch of a lane that has no tokens in a step of other lanes."""
        nothing, zero = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        return cls(nothing, nothing, zero, zero[:0], (), [], lanes=lanes)

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]
