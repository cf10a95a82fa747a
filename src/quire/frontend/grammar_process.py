"""A process that makes and compiles the grammars of requests: see bounded_process.

A compiled grammar cannot leave its process. So this is a trial, with the vocabulary of the model. A grammar that passes
here within the bounds is compiled again by the engine, in a thread and without Python's lock.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

import msgspec

from quire.frontend import bounded_process
from quire.grammar.compiled import STACK_BYTES, compiled_matcher, vocabulary
from quire.grammar.text import grammar_text
from quire.messages import UseTokenizer
from quire.sampling_params import StructuredOutputsParams


class Vocabulary(msgspec.Struct):
    """What grammars are about, and the processor time for reading it and for each grammar."""

    tokenizer: UseTokenizer
    vocab_size: int
    special_ids: dict[str, int]
    max_seconds: float


def main() -> None:
    """Serve the socket on standard input until it ends."""
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    half = STACK_BYTES // 2
    num_bytes = half if most == resource.RLIM_INFINITY else min(half, most)
    resource.setrlimit(resource.RLIMIT_STACK, (num_bytes, most))
    bounded_process.run(Vocabulary, _compiler)


def _compiler(given: Vocabulary) -> Callable[[bytes], str]:
    tokenizer = vocabulary(given.tokenizer.tokenizer, given.tokenizer.eos_token_ids, given.vocab_size)

    def grammar(body: bytes) -> str:
        text = grammar_text(msgspec.json.decode(body, type=StructuredOutputsParams), given.special_ids)
        compiled_matcher(tokenizer, text)
        return text

    return grammar


if __name__ == "__main__":
    main()
