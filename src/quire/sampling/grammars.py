"""Keeps rows with a grammar to the tokens that it allows.

Dimensions: R rows of a call, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.grammar.matchers import RowGrammar, token_masks
from quire.kernels import gpu


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
        masked.append(index)
        drafts = before[index] if before else ()
        if drafts:  # the longest of a row counts: it comes last
            asked[-1] = (grammar, asked[-1][1], drafts)
        else:
            asked.append((grammar, index, ()))
    if not asked:
        return failed
    num_tokens = logits_RV.shape[1]
    masks_RW = token_masks(asked, len(rows), num_tokens)
    for grammar, index, _ in asked:
        if (error := grammar.error) is not None:
            failed[index] = error
    bits_RV = np.unpackbits(masks_RW[masked].view(np.uint8), axis=1, count=num_tokens, bitorder="little")
    forbidden_RV = gpu.place(torch.from_numpy(bits_RV == 0), logits_RV.device)
    if len(masked) == len(rows):
        logits_RV.masked_fill_(forbidden_RV, -math.inf)
    else:
        for index, forbidden_V in zip(masked, forbidden_RV, strict=True):
            logits_RV[index].masked_fill_(forbidden_V, -math.inf)
    return failed
