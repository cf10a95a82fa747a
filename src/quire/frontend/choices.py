"""Checks that allowed_token_ids, bad_words and min_tokens together always leave a token to sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams, SpelledWords


@dataclass(slots=True)
class _Ending:
    """An end of an output: a node in a tree of token ids that are read backwards."""

    excluded: set[int] = field(default_factory=set)  # tokens that complete a bad word after this end
    longer: dict[int, _Ending] = field(default_factory=dict)  # the key is the token id before it


def check_choices(params: SamplingParams, stop_token_ids: Sequence[int], max_tokens: int, vocab_size: int) -> None:
    """Refuse constraints that can leave no token at some point of an output.

    Args:
        params: parameters with `bad_words_spelled` or `bad_words_token_ids`.
        stop_token_ids: excluded before min_tokens; after that they end the output.
        max_tokens: the longest output.
    Raises:
        InvalidRequestError: it has the names of the constraints.
    """
    sequences = params.bad_words_token_ids or []
    stops, endings = set(stop_token_ids), _endings(params.bad_words_spelled, params.allowed_token_ids)
    excludable = {sequence[-1] for sequence in sequences} | endings | (stops if params.min_tokens else set())
    if len(excludable) < (vocab_size if params.allowed_token_ids is None else 1):
        return
    allowed = set(range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids)
    root = _Ending(endings)
    for sequence in sequences:
        ending = root
        for token_id in reversed(sequence[:-1]):
            ending = ending.longer.setdefault(token_id, _Ending())
        ending.excluded.add(sequence[-1])
    written = allowed - root.excluded - stops  # the possible tokens of an output that continues
    for output in ([], *(sequence[:-1] for sequence in sequences)):
        if len(output) >= max_tokens or not written.issuperset(output):
            continue
        if allowed <= _excluded_after(output, root) | (stops if len(output) < params.min_tokens else set()):
            raise _nothing_left(params)


def _endings(words: SpelledWords | None, allowed_token_ids: Sequence[int] | None) -> set[int]:
    """Tokens that complete a forbidden word after other allowed tokens of it. They count as never allowed.

    Each word is checked by itself, even if another word or a stop would come first.
    """
    allowed = None if allowed_token_ids is None else set(allowed_token_ids)
    endings: set[int] = set()
    for word in [] if words is None else words.words:
        out = {0}  # possible numbers of the word's bytes that are already in the output
        for count, step in [(0, word.anywhere), *enumerate(word.steps)]:
            if count not in out:
                continue
            for token_id in step if allowed is None else allowed.intersection(step):
                out.update(step[token_id])
                if len(word.steps) in step[token_id]:
                    endings.add(token_id)
    return endings


def _excluded_after(output: Sequence[int], ending: _Ending) -> set[int]:
    """Tokens that complete a bad word after every output that ends with `output`."""
    excluded = set(ending.excluded)
    for token_id in reversed(output):
        if token_id not in ending.longer:
            break
        ending = ending.longer[token_id]
        excluded |= ending.excluded
    return excluded


def _nothing_left(params: SamplingParams) -> InvalidRequestError:
    named = [name for name in ("allowed_token_ids", "bad_words", "min_tokens") if getattr(params, name)]
    return InvalidRequestError(
        f"With {' and '.join(named)} the output can reach a point where no token is left to sample",
        expected="a token at every point that is allowed, ends no bad word and, before min_tokens, does not stop",
        fix=f"Allow more tokens, or relax {' or '.join(named)}",
        param=named[0],
    )
