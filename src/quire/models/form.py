"""How a model is held and computed, and the ranks with which it is shared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.distributed.group import Group
from quire.moe.dispatch import Dispatch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ModelForm:
    """How a model is held and computed.

    Attributes:
        dtype: the dtype of weights and activations.
        quantization: a key of ON_LOAD; None: weights stay in the checkpoint's format.
        device: the model runs there, and `load_weights` brings the tensors there.
        attention_backend: the name of the backend; see attention.select.
        cache_dtype: the dtype of the KV cache; None: it is `dtype`.
    """

    dtype: torch.dtype
    quantization: str | None = None
    device: torch.device = CPU
    attention_backend: str = "auto"
    cache_dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The ranks with which a model is shared. Its config describes the part of this rank.

    Attributes:
        group: the ranks that share the model (tensor parallelism); None: one rank has all of it.
        dispatch: sends rows to the ranks of their experts; None: lanes share no experts.
        num_kv_owners: the number of neighbouring ranks of the group that share one KV cache.
    """

    group: Group | None = None
    dispatch: Dispatch | None = None
    num_kv_owners: int = 1


ALONE = Sharing()
