"""Log probabilities of chosen and of most likely tokens, for sampled tokens and for prompts.

Dimensions: R rows, V vocabulary, K reported tokens.
"""

from __future__ import annotations

import math

from torch import Tensor

from quire.kernels import ops
from quire.kernels.reference import sampling_units
from quire.schedule import TokenLogprobs

Scores = tuple[Tensor, Tensor, Tensor, Tensor]  # the results of ops.logprobs, in its order


def scores(logits_RV: Tensor, token_ids_R: Tensor, num_top: int, as_logits: bool) -> Scores:
    """Scores of the given tokens and of the `num_top` highest, on the logits' device. On a GPU it does not wait.

    The highest come in descending order, ties by ascending id. The rank of a given token is 1 + the number of tokens
    with a higher logit.

    Args:
        logits_RV: float32, rows contiguous, not normalised.
        token_ids_R: int64: sampled tokens, or the next tokens of a prompt.
        num_top: -1: the whole vocabulary.
        as_logits: report logits instead of log probabilities.
    """
    vocab_size = logits_RV.shape[1]
    num_top = vocab_size if num_top == -1 else min(num_top, vocab_size)
    logprobs_R, ranks_R, top_ids_RK, top_logprobs_RK = ops.logprobs(logits_RV, token_ids_R, num_top)
    if as_logits:
        logprobs_R = logits_RV.gather(1, token_ids_R[:, None])[:, 0]
        top_logprobs_RK = logits_RV.gather(1, top_ids_RK.clamp(min=0))  # -1 in rows that are not numbers
    return logprobs_R, ranks_R, top_ids_RK, top_logprobs_RK


def entries(
    token_ids_R: Tensor, logprobs_R: Tensor, ranks_R: Tensor, top_ids_RK: Tensor, top_logprobs_RK: Tensor
) -> list[TokenLogprobs]:
    """The result of `scores` as entries, one per row."""
    top_ranks = list(range(1, top_ids_RK.shape[1] + 1))
    given = zip(token_ids_R.tolist(), logprobs_R.tolist(), ranks_R.tolist(), strict=True)
    return [
        TokenLogprobs([token_id, *top_ids], [logprob, *top_logprobs], [rank, *top_ranks])
        for (token_id, logprob, rank), top_ids, top_logprobs in zip(
            given, top_ids_RK.tolist(), top_logprobs_RK.tolist(), strict=True
        )
    ]


def processed(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Logits / temperature, with -inf for tokens that min-p, top-k and top-p leave out. Sampling draws from these.

    Rows of temperature 0 (greedy) do not change. It sorts the vocabulary, so only the processed_* logprob modes use it.
    """
    processed_RV = logits_RV.clone()
    parameters = zip(temperature_R.tolist(), top_k_R.tolist(), top_p_R.tolist(), min_p_R.tolist(), strict=True)
    for row_V, (temperature, top_k, top_p, min_p) in zip(processed_RV, parameters, strict=True):
        if temperature == 0.0:
            continue
        if top_k or top_p < 1.0 or min_p:
            row_V[sampling_units(row_V, temperature, top_k, top_p, min_p) == 0] = -math.inf
        row_V /= temperature
    return processed_RV
