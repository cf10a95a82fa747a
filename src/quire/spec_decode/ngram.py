"""`ngram`, known as prompt lookup: the continuation of an earlier place with the request's last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from quire import extension
from quire.request import Request

if TYPE_CHECKING:
    from quire import _C


class NgramProposer:
    """Drafts out of a request's own prompt and output, as vLLM's `ngram` method has them.

    The proposer looks for the last n tokens of the text in the text before. It takes the largest n from
    prompt_lookup_min to prompt_lookup_max for which they stand there, and the first place where they stand. That place
    may overlap the end of the text. The draft is what follows there, up to the end of the text. (vLLM:
    v1/spec_decode/ngram_proposer.py.)

    A request has an index in C++, which is made at its first draft and grows by new tokens only. It takes 4 to 8 bytes
    a token, and up to 16 more for each length of n-grams.
    """

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        """Lengths in tokens: 1 <= min <= max. Raises ConfigError without the compiled extension."""
        extension.require("Speculation by ngram")
        self._make_index = partial(extension.C.NgramIndex, shortest=prompt_lookup_min, longest=prompt_lookup_max)
        self._indexes: dict[str, _C.NgramIndex] = {}

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See scheduler/proposer.py."""
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = self._make_index()
            return index.propose(request.token_ids(), most)
        num_seen = index.num_tokens - len(request.prompt_token_ids)
        return index.propose(request.output_token_ids[num_seen:], most)

    def forget(self, request_id: str) -> None:
        """See scheduler/proposer.py."""
        self._indexes.pop(request_id, None)
