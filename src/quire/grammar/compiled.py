"""A compiled grammar, the same where it is tried and where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.errors import InvalidRequestError, VocabularyError
from quire.grammar.limits import parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# A thread of an engine that compiles grammars has this stack: each reference in a schema takes some KiB of it. The
# process that tries grammars has half, so a grammar that passes there does not end an engine.
STACK_BYTES = 8 << 20


def vocabulary(tokenizer: str, eos_token_ids: Sequence[int], vocab_size: int) -> LLTokenizer:
    """The vocabulary that grammars are compiled for. It holds Python's lock: 20 ms for 4,000 tokens, 0.8 s for 150,000.

    Args:
        tokenizer: the content of a tokenizer.json.
        vocab_size: the tokens that logits have.
    Raises:
        VocabularyError: llguidance cannot use this tokenizer.
    """
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # ValueError, or a panic in Rust, which is no Exception
        raise VocabularyError(f"The tokenizer of this model cannot be used for constraints: {error}") from None


def compiled_matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher at the beginning of a grammar, with its first mask. Raises InvalidRequestError."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask is the slowest: it is made here, not in a step
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        why = first_line(matcher.get_error())
        if why in ("", "NoExtensionBias"):  # no byte is allowed
            why = "nothing satisfies it"
        raise InvalidRequestError(f"The grammar cannot be used: {why}", param="structured_outputs")
    return matcher


def first_line(text: str) -> str:
    return text.partition("\n")[0]
