"""The residual streams of a target that a head reads. Stages bring them to the last stage, where the head is.

Dimensions: T tokens of a step, A streams, D hidden, X elements of all streams of a position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.distributed.group import Link
from quire.models.decoder import Decoder


class TargetStreams:
    """The residual streams of the target's last step that a head reads: those of this stage and of stages before it.

    Args:
        target: it copies its residual streams here in each pass, from now on.
        layers: the layers before which the streams are read: see DraftHead.
        max_tokens: the most tokens of a step.
    """

    def __init__(self, target: Decoder, layers: Sequence[int], max_tokens: int) -> None:
        self._size = target.config.hidden_size
        self._kept_TAD = torch.empty((max_tokens, len(layers), self._size), dtype=target.dtype, device=target.device)
        target.keep_streams(layers, self._kept_TAD)
        self.kept_TX = self._kept_TAD.view(max_tokens, -1)
        first = 0 if target.config.stage is None else target.config.stage.layers.start
        self._received = [at for at, layer in enumerate(layers) if layer < first]

    def receive(self, before: Link, num_tokens: int) -> None:
        """Get the streams of this step that stages before have."""
        for at in self._received:
            rows_TD = before.receive(num_tokens, self._size, self._kept_TAD.dtype)
            self._kept_TAD[:num_tokens, at].copy_(rows_TD)

    def send(self, behind: Link, num_tokens: int) -> None:
        """Send all streams of this step to the next stage."""
        for at in range(self._kept_TAD.shape[1]):
            behind.send(self._kept_TAD[:num_tokens, at])
