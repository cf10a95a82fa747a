"""Grammars of requests from a few bounded processes, which start with the first constraint."""

from __future__ import annotations

import asyncio
import json

from msgspec import structs

from quire.errors import CompilerLostError, InvalidRequestError, VocabularyError
from quire.frontend.bounded_pool import MAX_SECONDS, BoundedPool
from quire.frontend.bounded_process import framed
from quire.frontend.grammar_process import Vocabulary
from quire.frontend.input_processor import InputProcessor
from quire.grammar.kept import Kept
from quire.sampling_params import StructuredOutputsParams

_KEPT_BYTES = 16 << 20


class GrammarPool(BoundedPool):
    """`grammar.text.grammar_text` behind processes. Each of them compiles the grammar too.

    Args:
        inputs: the inputs of a model with a tokenizer.
        max_seconds: processor time of one grammar. After it the process is killed and the request refused.
    """

    module = "quire.frontend.grammar_process"
    task = "compiles constraints"
    culprit = "constraint"
    lost = CompilerLostError

    def __init__(self, inputs: InputProcessor, max_seconds: float = MAX_SECONDS) -> None:
        super().__init__(
            lambda: Vocabulary(inputs.use_tokenizer(), inputs.limits.vocab_size, inputs.special_ids, max_seconds)
        )
        self._kept: Kept[str] = Kept(_KEPT_BYTES, lambda asked, grammar: len(asked) + len(grammar))

    async def grammar(self, asked: StructuredOutputsParams) -> str:
        """The text of a grammar that a worker can compile.

        Raises:
            InvalidRequestError: see grammar_text; or compiling it took too much processor time or memory.
            VocabularyError: the model's tokenizer cannot be used for constraints.
            CompilerLostError: two processes ended or stood still, and the constraint is not the reason.
        """
        # To write a schema of 15 MB takes 0.2 s.
        frame = await asyncio.to_thread(_written, asked) if _has_schema_to_write(asked) else _written(asked)
        key = frame.decode("utf-8", "surrogateescape")
        if (kept := self._kept.get(key)) is None:
            kept = await self.text(frame)
            self._kept.put(key, kept)
        return kept

    def unprepared(self, fault: str) -> VocabularyError:
        return VocabularyError(f"The tokenizer of this model cannot be used for constraints: reading it {fault}")

    def refusal(self, fault: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"The constraint {fault} while it was compiled", fix="Send a simpler one", param="structured_outputs"
        )


def _has_schema_to_write(asked: StructuredOutputsParams) -> bool:
    """Whether the constraint is a schema that is not text yet."""
    return asked.json is not None and not isinstance(asked.json, str)


def _written(asked: StructuredOutputsParams) -> bytes:
    """The framed constraint. Raises InvalidRequestError."""
    try:
        if _has_schema_to_write(asked):
            asked = structs.replace(asked, json=json.dumps(asked.json))  # NaN and long numbers pass as text
        return framed(asked)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"structured_outputs.{asked.kind} cannot be written as JSON: {error}", param="structured_outputs"
        ) from None
