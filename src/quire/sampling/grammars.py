"""Keeps rows with a grammar to the tokens that it allows.

Dimensions: R rows of a call, M of them with a grammar, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.grammar.matchers import RowGrammar, token_masks
from quire.kernels import gpu, ops


def apply_grammars(
    logits_RV: Tensor, rows: Sequence[int], grammars: dict[int, RowGrammar], before: Sequence[Sequence[int]] = ()
) -> dict[int, str]:
    """Forbid in place what a row's grammar does not allow next. `logits_RV[i]` belongs to `rows[i]`.

    Returns:
        The index in the call of each row whose grammar has failed, with the reason.

    Args:
        before: see Sampler.launch. The row of logits of a request come one behind the other.
    """
    asked: list[tuple[RowGrammar, int, Sequence[int]]] = []
    failed: dict[int, str] = {}
    masked: list[int] = []
    for index, row in enumerate(rows):
        if (grammar := grammars.get(row)) is None:
            continue
        drafts = before[index] if before else ()
        if drafts:  # the longest of a row counts: it comes last
            asked[-1] = (grammar, asked[-1][1], drafts)
        else:
            asked.append((grammar, len(masked), ()))
        masked.append(index)
    if not asked:
        return failed
    masks_MW = torch.from_numpy(token_masks(asked, len(masked), logits_RV.shape[1]))
    for grammar, first, _ in asked:
        if (error := grammar.error) is not None:
            failed[masked[first]] = error
    device, rows_M = logits_RV.device, torch.tensor(masked, dtype=torch.int32)
    ops.forbid_tokens(logits_RV, gpu.place(masks_MW, device), gpu.place(rows_M, device))
    return failed
