"""`suffix`: suffix decoding, the most frequent continuation of the last tokens in the request and in other answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from quire import extension
from quire.request import Request

if TYPE_CHECKING:
    from quire import _C


class SuffixProposer:
    """Drafts from a request's own text, and from the answers of others: SuffixDecoding (arXiv 2411.04975).

    The proposer looks for the places where the last m tokens of the text stood before, for each m from 1 to
    max_tree_depth - 1. The first token of a draft is the token that follows at most of these places. The other places
    are dropped, and the next token is found in the same way. The probability of a token is the share of the places that
    are left. A draft ends before a token whose probability is below min_token_prob, after max_spec_factor * m tokens,
    and when m and the draft together have max_tree_depth tokens. Each m gives a draft. The proposer answers the draft
    with the largest sum of probabilities. If sums are equal, the request's own text goes before other texts, and a
    longer m before a shorter one. That is the rule of vLLM's `suffix` method (Arctic Inference,
    csrc/suffix_decoding/suffix_tree.cc), with two differences:

    - Only the newest places count. The index finds the places of n-grams of 1, 2, 4 and 8 tokens, and looks at the
      newest 32 places of the longest one that m tokens contain. So a draft takes microseconds, whatever the text is.
      If two tokens are equally frequent, the one at the newest place is taken.
    - There is no tree. A request's own text takes 28 to 72 bytes a token. Answers of all requests are kept in pages of
      32 tokens, and a page is there for others once it is full or the request has ended.

    Shared answers are read only by requests with the same cache salt and adapter. The oldest pages are dropped when
    the memory is full, and when there are answers of more than max_cached_requests requests.
    """

    def __init__(
        self,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
        shared_bytes: int,
    ) -> None:
        """vLLM's `suffix_decoding_*` have the same names and meanings.

        Args:
            max_cached_requests: 0: answers are not shared.
            shared_bytes: most memory for shared answers. It is taken as they come.

        Raises ConfigError without the compiled extension.
        """
        extension.require("Speculation by suffix")
        self._shared: _C.SharedTexts | None = None
        if max_cached_requests > 0:
            self._shared = extension.C.SharedTexts(max_bytes=shared_bytes, max_requests=max_cached_requests)
        self._make_index = partial(
            extension.C.SuffixIndex,
            max_depth=max_tree_depth,
            max_spec_factor=max_spec_factor,
            min_token_prob=min_token_prob,
            shared=self._shared,
        )
        self._indexes: dict[str, tuple[Request, _C.SuffixIndex]] = {}

    @property
    def shared_bytes(self) -> int:
        """Memory that shared answers may take: at most the given bytes, and at least one page of 1,184 bytes."""
        return 0 if self._shared is None else self._shared.num_bytes

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See scheduler/proposer.py."""
        known = self._indexes.get(request.request_id)
        if known is None:
            index = self._make_index(tenant=_tenant(request), num_prompt=len(request.prompt_token_ids))
            self._indexes[request.request_id] = request, index
            return index.propose(request.token_ids(), most)
        index = known[1]
        return index.propose(_not_seen(request, index), most)

    def forget(self, request_id: str) -> None:
        """See scheduler/proposer.py. The rest of the answer is there for others from now on."""
        if (known := self._indexes.pop(request_id, None)) is not None:
            request, index = known
            index.finish(_not_seen(request, index))


def _not_seen(request: Request, index: _C.SuffixIndex) -> list[int]:
    return request.output_token_ids[index.num_tokens - len(request.prompt_token_ids) :]


def _tenant(request: Request) -> bytes:
    """16 bytes that stand for those who may read a request's text. Nobody can find two names with the same bytes
    (SHA-256).
    """
    name = repr((request.adapter, request.cache_salt)).encode("utf-8", "surrogatepass")
    return hashlib.sha256(name).digest()[:16]
