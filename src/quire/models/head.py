"""A head that drafts from the hidden states of its target, a decoder.

It is an EAGLE-3 head (arXiv 2503.01840), or the target's own layer for multi-token prediction (MTP, arXiv 2412.19437).

At each position, a pass takes the hidden state of this position and the token of the next position. It gives the hidden
state for the next position. The first draft uses the target's hidden state. Later drafts use the head's own.

Dimensions: T tokens, R rows with logits, D hidden, X hidden states of the target, V vocabulary, K tokens it can draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import WeightsError
from quire.forward_batch import ForwardBatch
from quire.kernels.fp8 import Rows
from quire.layers.embedding import Lookup
from quire.layers.linear import make_linear
from quire.layers.norm import make_norm
from quire.layers.weight_slot import WeightSlot, WeightSlots
from quire.model_config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.form import ModelForm
from quire.quantization.scheme import FLOATS


class Head(Decoder):
    """A Decoder that drafts for another one.

    Args:
        config: a config with a `head`.
        target: the model that verifies the drafts. The head uses its embeddings and its output projection, unless the
            head's checkpoint has its own.
    """

    def __init__(self, config: ModelConfig, target: Decoder, form: ModelForm) -> None:
        assert config.head is not None
        self.head, self._target = config.head, target
        super().__init__(config, form)

    def _make_embeddings(self) -> Lookup:
        config, head = self.config, self.head
        self._input = make_linear(config.stored(head.input, self._form.quantization), self.dtype)
        self._parts += [(head.input.prefix, part) for part in self._input.parts]
        self._norms = [make_norm(shape, config.rms_norm_eps, config.norm_offset, self.dtype) for shape in head.norms]
        self._parts += [(f"{shape.name}.", norm) for shape, norm in zip(head.norms, self._norms, strict=True)]
        self._drafted = _DraftedTokens(head.num_tokens, config.vocab_size) if head.maps_tokens else None
        if self._drafted is not None:
            self._parts.append(("", self._drafted))
        self._output = self._make_output() if head.owns_output else self._target._output
        return self._make_own_embeddings() if head.owns_embeddings else self._target._embed

    def hidden_of(self, streams_TX: Tensor) -> Tensor:
        """The head's hidden_TD, from the residual streams that the target has kept, side by side in one row."""
        if self.head.kind == "eagle3":
            return self._input(streams_TX)
        return self._target.normed(streams_TX) if self.head.reads_normed else streams_TX

    def embed_step(self, batch: ForwardBatch) -> Tensor:
        """The embeddings of the tokens [T, D]. An MTP layer takes zeros at position 0."""
        embedding_TD = self._embed(batch.token_ids_T)
        if self.head.kind == "mtp":
            embedding_TD = embedding_TD * (batch.positions_T > 0)[:, None]
        return embedding_TD

    def run_blocks(self, residual_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute hidden_TD for the next positions. An EAGLE-3 head overwrites `batch.hidden_TD` with it.

        Args:
            residual_TD: the result of `embed_step`.
            batch: its `hidden_TD` are the hidden states of the present positions.
        """
        given, residual_TD = self._begin(residual_TD, batch)
        for part in self._parts_of_pass:
            given = part(given, residual_TD, batch)
        if self.head.kind == "eagle3":
            return residual_TD
        assert isinstance(given, Tensor), "the final norm feeds no layer"
        return given

    def read(self, batch: ForwardBatch) -> None:
        """Write the keys and values of the positions of a batch, and compute no hidden states of the next positions.

        That is all that later passes need. In the last layer, k and v are projected, and q only if it is stored with
        them. Attention and everything behind it are left out. A head has one layer as a rule, and then this is most of
        its work.
        """
        if batch.host is not None and len(self._layers) > 1:
            self.prepare(batch.host, batch.caches)
        given, residual_TD = self._begin(self.embed_step(batch), batch)
        last = self._layers[-1]
        for part in self._parts_of_pass[: -len(last)]:
            given = part(given, residual_TD, batch)
        last[0].write(given, batch)

    def _begin(self, residual_TD: Tensor, batch: ForwardBatch) -> tuple[Rows, Tensor]:
        """The input of the first layer, and the residual stream before it."""
        hidden_TD = batch.hidden_TD
        if hidden_TD is None:  # the worker only measures the memory and the time of this step
            hidden_TD = torch.zeros_like(residual_TD)
        num_tokens, width = hidden_TD.shape
        x_TX = torch.empty((num_tokens, 2 * width), dtype=self.dtype, device=self.device)
        halves = x_TX.split_with_sizes((width, width), 1)
        is_eagle3 = self.head.kind == "eagle3"
        token_norm, hidden_norm = self._norms
        of_token, of_hidden = halves if is_eagle3 or self.head.token_first else reversed(halves)
        token_norm(residual_TD, out=of_token)
        hidden_norm(hidden_TD, out=of_hidden)
        if is_eagle3:
            if self.head.norm_before_residual:
                hidden_TD.copy_(halves[1])
            return x_TX, hidden_TD
        first_norm, residual_TD = self._sublayers[0].input_norm, self._input(x_TX)
        return residual_TD if first_norm is None else first_norm.feed(residual_TD), residual_TD

    def compute_logits(
        self, hidden_RD: Tensor, adapter_slots_R: Tensor | None = None, owners_R: Tensor | None = None
    ) -> Tensor:
        """Compute logits_RV in float32; they are minus infinity for tokens that the head cannot draft.

        As in Decoder, the first rank gets them. A head takes no adapters and no owners.
        """
        assert adapter_slots_R is None, "a head drafts without adapters"
        assert owners_R is None, "the first rank draws all drafts"
        x_RD = self._final_norm(hidden_RD) if self.head.kind == "eagle3" else hidden_RD
        logits_RK = self._output.logits(x_RD)
        if not self.head.owns_output:
            logits_RK = self._target.join_logits(logits_RK)
        if self.config.logits_scaling != 1.0:
            logits_RK /= self.config.logits_scaling
        return logits_RK if self._drafted is None else self._drafted.spread(logits_RK)


class _DraftedTokens:
    """The target's token id of each token that the head can draft.

    The checkpoint's tensor `d2t` holds differences: token k of the head is token k + d2t[k] of the target.
    """

    held = ("token_ids_K",)

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        self.token_ids_K = torch.empty(0, dtype=torch.int64)
        self._num_tokens, self._vocab_size = num_tokens, vocab_size

    def spread(self, logits_RK: Tensor) -> Tensor:
        """Logits of the target's vocabulary: minus infinity for tokens that the head does not have."""
        logits_RV = logits_RK.new_full((len(logits_RK), self._vocab_size), -torch.inf)
        logits_RV[:, self.token_ids_K] = logits_RK
        return logits_RV

    def slots(self) -> WeightSlots:
        # The float dtypes are for dummy weights, which are numbers around 0.
        yield "d2t", WeightSlot((self._num_tokens,), self._load, (torch.int64, torch.int32, *FLOATS))

    def _load(self, offsets_K: Tensor) -> None:
        token_ids_K = torch.arange(self._num_tokens, device=offsets_K.device) + offsets_K.long()
        for place, token_id in enumerate(token_ids_K.tolist()):
            if not 0 <= token_id < self._vocab_size:
                raise WeightsError(f"entry {place} is token {token_id}, but the model has {self._vocab_size} tokens")
        self.token_ids_K = token_ids_K

    def weight_bytes(self) -> int:
        return self.token_ids_K.nbytes
