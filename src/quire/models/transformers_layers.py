"""Our layers inside transformers' modelling code, and how several ranks share them.

The modelling code knows no ranks. A rank has some outputs of a linear layer, some tokens of the embeddings and some
heads of attention, and ranks join the results of each of these layers. Everything between them is computed by all
ranks, from equal values. So a token has the same bits at every number of ranks, whatever the architecture, if torch has
as many threads.

Dimensions: T tokens, K in-features, N out-features, D hidden, V vocabulary, H query heads, G kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.distributed.group import Group
from quire.distributed.layout import head_shares, shares
from quire.formats.weight_format import PANEL_WIDTH
from quire.kernels.dense import linear, pack_linear
from quire.layer_spec.cuts import Share
from quire.layers.joined import JoinedLookup
from quire.layers.weight_slot import Extent, ExtentOf
from quire.logs import get_logger

logger = get_logger(__name__)


class CodeRanks:
    """The ranks that run one model's modelling code side by side. It is a Gathering."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.group, self._is_alone = group.rank, group.size, group, False

    def rows(self, num_rows: int) -> list[range] | None:
        """The rows of each rank: whole panels. None: there are fewer panels than ranks, so each rank has all rows."""
        ranges = shares(num_rows, self.size, PANEL_WIDTH)
        return ranges if all(ranges) else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In the block, this rank does not wait for others: its own columns stand for theirs. Values mean nothing."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """See Gathering."""
        if not self._is_alone:
            return self.group.gather(part, widths)
        num_columns = sum(widths)
        return part.repeat(1, -(-num_columns // part.shape[1]))[:, :num_columns]


class KernelLinear(nn.Module):
    """Replaces an nn.Linear. Its weight has the layout of our kernels.

    Args:
        weight_NK: the weight; the rows of this rank are copied.
        bias_N: the bias; None: there is none.
        device: the weight is brought there.
        ranks: the ranks that share the layer; None: there is one rank.
    """

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None, device: torch.device, ranks: CodeRanks | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        self._ranks, rows = ranks, None if ranks is None else ranks.rows(self.out_features)
        self._widths = None if rows is None else list(map(len, rows))
        own = _own(ranks, rows)
        self.packed = pack_linear(weight_NK[own].to(device))
        # Modelling code may ask for the dtype of a weight. A computation with this empty weight must fail.
        self.weight = torch.empty(0, dtype=weight_NK.dtype, device=device)
        self.bias = None if bias_N is None else nn.Parameter(bias_N[own], requires_grad=False)

    @property
    def is_cut(self) -> bool:
        """Whether this rank has only some of the outputs."""
        return self._widths is not None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        y_TN = linear(x.reshape(-1, self.in_features), self.packed, self.bias)
        if self._ranks is not None and self._widths is not None:
            y_TN = self._ranks.gather(y_TN, self._widths)
        return y_TN.view(*x.shape[:-1], self.out_features)


class CutEmbedding(nn.Module):
    """Replaces the nn.Embedding that token ids are looked up in, on one of several ranks.

    Args:
        weight_VD: the table; a view of the rows of this rank is kept.
        rows: the rows of each rank.
    """

    def __init__(self, weight_VD: Tensor, device: torch.device, ranks: CodeRanks, rows: Sequence[range]) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight_VD.shape
        self.own_VD = nn.Parameter(weight_VD[_own(ranks, rows)], requires_grad=False)
        self.weight = torch.empty(0, dtype=weight_VD.dtype, device=device)  # as in KernelLinear
        share = Share(ranks.rank, (tuple(rows),), (self.num_embeddings,))
        self._joined = JoinedLookup(lambda token_ids_T: F.embedding(token_ids_T, self.own_VD), share, ranks, device)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 ids [...] -> [..., D]."""
        return self._joined(token_ids.reshape(-1)).view(*token_ids.shape, self.embedding_dim)


class HeadsOfRanks:
    """The heads of each rank in one layer, and the KV heads that they read.

    Attributes:
        counts: the number of heads of each rank.
        own_q, own_kv: the heads of this rank.
    """

    def __init__(self, ranks: CodeRanks, num_q_heads: int, num_kv_heads: int) -> None:
        self._ranks = ranks
        shared = head_shares(num_q_heads, num_kv_heads, ranks.size)
        self.counts = [len(queries) for queries, _ in shared]
        self.own_q, self.own_kv = shared[ranks.rank]

    def own(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of this rank: views."""
        queries, keys = (slice(heads.start, heads.stop) for heads in (self.own_q, self.own_kv))
        return q_THE[:, queries], k_TGE[:, keys], v_TGE[:, keys]

    def join(self, out_THE: Tensor) -> Tensor:
        """From the results of this rank's heads to those of all heads."""
        T, H, E = out_THE.shape
        return self._ranks.gather(out_THE.view(T, H * E), [count * E for count in self.counts]).view(T, -1, E)


def _own(ranks: CodeRanks | None, rows: Sequence[range] | None) -> slice:
    if ranks is None or rows is None:
        return slice(None)
    return slice(rows[ranks.rank].start, rows[ranks.rank].stop)


def replace_layers(model: Any, device: torch.device, ranks: CodeRanks | None = None) -> None:
    """Put our layers in place of linear layers one by one, so that only one weight at a time is in memory twice.

    Several ranks also share the embeddings of the tokens. Subclasses stay as they are. Layers that transformers keeps
    in float32 are replaced too: a rank has read only its rows of them (see `extents`).
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            layer: Any = child
            rows = None if ranks is None else _rows_of_embeddings(model, layer, ranks)
            if ranks is not None and rows is not None:
                setattr(parent, name, CutEmbedding(layer.weight, device, ranks, rows))
            elif (weight_NK := _weight(layer)) is not None:
                setattr(parent, name, KernelLinear(weight_NK, layer.bias, device, ranks))


def _weight(layer: Any) -> Tensor | None:
    """The weight [N, K] of a linear layer; None: it is another kind of module."""
    from transformers.pytorch_utils import Conv1D

    if type(layer) is nn.Linear:
        return layer.weight
    return layer.weight.T if type(layer) is Conv1D else None


def _rows_of_embeddings(model: Any, layer: nn.Module, ranks: CodeRanks) -> list[range] | None:
    """The tokens of each rank, if this is the layer that token ids are looked up in, and ranks can share it."""
    if type(layer) is not nn.Embedding or layer is not model.get_input_embeddings() or layer.max_norm is not None:
        return None
    return ranks.rows(layer.num_embeddings)


def extents(model: Any, ranks: CodeRanks) -> ExtentOf:
    """For the name of a tensor of a checkpoint, the part that `replace_layers` reads on this rank; None: all of it.

    All tensors are read whole if this version of transformers does not say which parameter each becomes.

    Args:
        model: a model of transformers on torch's device `meta`, with tied weights.
    """
    parts: dict[int, list[Extent | None]] = {}
    for module in model.modules():
        for name, tensor in module.named_parameters(recurse=False):
            parts.setdefault(id(tensor), []).append(_extent(model, module, ranks) if name == "weight" else None)
    tensors = model.state_dict(keep_vars=True)
    # Two layers may have one tensor. A part of it is enough if it is the part of both.
    found = {name: part for name, tensor in tensors.items() for part in _alike(parts.get(id(tensor), []))}
    parameter_of = _parameter_names(model, tensors)
    if parameter_of is None:
        logger.warning("each rank reads all of the checkpoint: transformers' names of tensors are not known here")
        return lambda checkpoint_name: None
    return lambda checkpoint_name: found.get(parameter_of(checkpoint_name))


def _parameter_names(model: Any, tensors: Mapping[str, Tensor]) -> Callable[[str], str] | None:
    """A function from a name in a checkpoint to the parameter that has the tensor's rows; "": none has just these.

    None: the names are not known. Functions of transformers that give them are private and exist since version 5, and
    some renamings depend on the names that were asked before.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

        changes = get_model_conversion_mapping(model)
        renamings = [change for change in changes if type(change) in (WeightRenaming, PrefixChange)]
        converters = [change for change in changes if type(change) is WeightConverter]

        def parameter_of(checkpoint_name: str) -> str:
            prefix = model.base_model_prefix
            name, converter = rename_source_key(checkpoint_name, renamings, converters, prefix, tensors)
            return name if converter is None else ""

        parameter_of("")  # fails here if it takes other arguments
    except (ImportError, TypeError, ValueError):
        return None
    return parameter_of if len(renamings) + len(converters) == len(changes) else None


def _alike(parts: Sequence[Extent | None]) -> list[Extent]:
    """The part of a tensor that all layers read; empty: they read different parts, or all of it."""
    return [part for part in parts[:1] if part is not None and all(part == other for other in parts)]


def _extent(model: Any, module: nn.Module, ranks: CodeRanks) -> Extent | None:
    """The part of a module's weight that this rank reads."""
    if (weight_NK := _weight(module)) is not None:
        rows = ranks.rows(len(weight_NK))
    else:
        rows = _rows_of_embeddings(model, module, ranks)
    if rows is None:
        return None
    own, num_rows = rows[ranks.rank], rows[-1].stop
    if weight_NK is not None and not isinstance(module, nn.Linear):  # Conv1D: outputs are columns of the tensor
        num_columns, num_rows = num_rows, weight_NK.shape[1]
        return Extent(num_rows, (range(num_rows),), num_columns, (own,))
    return Extent(num_rows, (own,))
