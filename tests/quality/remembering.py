"""A base that many models are compared with computes its logits once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from quire.worker.model_runner import ModelRunner


def remembering(runner: ModelRunner) -> ModelRunner:
    """The same runner, which keeps the logits of all sequences that it was asked about."""
    compute, known = runner.sequence_logits, dict[tuple[int, ...], list[Tensor]]()

    def sequence_logits(token_ids: Sequence[int], step_tokens: int) -> Iterator[Tensor]:
        key = (step_tokens, *token_ids)
        if key not in known:
            known[key] = [logits_XV.clone() for logits_XV in compute(token_ids, step_tokens)]
        return iter(known[key])

    runner.sequence_logits = sequence_logits  # type: ignore[method-assign, assignment]
    return runner
