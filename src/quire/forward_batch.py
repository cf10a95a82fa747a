"""Every tensor a layer may read in one forward pass. Passed down the model, never global.

Dimensions: T tokens of this step, S sequences of this step, M blocks in the longest table,
B blocks, G kv heads, P block size, E head dim, C rows a worker holds, N block tables of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV cache of one layer: both tensors [num_blocks, num_kv_heads, block_size, head_dim], contiguous in a block.

    They hold the model's dtype or codes of 8 bits (float8_e4m3fn, float8_e5m2, int8). int8 codes have a float32 scale
    per token and KV head beside them, in the same blocks: [num_blocks, num_kv_heads, block_size]. Between two blocks of
    a layer lie those of other layers.
    """

    k_BGPE: Tensor
    v_BGPE: Tensor
    k_scales_BGP: Tensor | None = None
    v_scales_BGP: Tensor | None = None
    table: int = 0  # which of ForwardBatch.tables says where its blocks are
    compiled: Any = field(default=None, init=False, repr=False, compare=False)
    """As the kernels of a CPU take it: they make it at their first call, of these very tensors."""

    def tensors(self) -> list[Tensor]:
        """All memory of the layer; the first dimension of each is the block."""
        tensors = (self.k_BGPE, self.v_BGPE, self.k_scales_BGP, self.v_scales_BGP)
        return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True, slots=True)
class HostStep:
    """What the host knows of a step that a GPU computes: for backends that plan it there. Holds until the next step."""

    rows_S: NDArray[np.int64]  # of block_tables
    query_lens_S: NDArray[np.int64]
    seq_lens_S: NDArray[np.int64]  # after this step
    block_tables_NCM: NDArray[np.int32]  # each block table, of all rows
    padded_rows: int | None  # of a captured step: those behind the step's own compute nothing


@dataclass(slots=True)
class StepTable:
    """Where the tokens of a step are in the cache of the layers that share a block table."""

    slot_mapping_T: Tensor  # int64: block_id * block_size + offset
    block_tables_SM: Tensor  # int32


@dataclass(slots=True)
class ForwardBatch:
    """One step's rows, packed: tokens of sequence s are cu_seqlens_q[s]..cu_seqlens_q[s+1].

    The query tokens of a sequence are its last positions: token i of a row with seq_len L and query length Q is at
    position L - Q + i.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64: rows of the rotary table; of long sequences under longrope, positions plus an offset
    cu_seqlens_q_S1: Tensor  # int32, S + 1 prefix sums
    seq_lens_S: Tensor  # int32, KV length after this step
    tables: tuple[StepTable, ...]
    caches: list[LayerCache]  # one per layer
    host: HostStep | None = None  # None: on CPU, and where the step has been prepared already

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]
