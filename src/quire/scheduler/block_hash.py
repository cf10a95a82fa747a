"""Content hash of KV-cache blocks: a SHA-256 chain over adapter, salt, rotary table and token ids."""

from __future__ import annotations

import hashlib
import struct

from quire.request import Request


class BlockHasher:
    """Hashes full blocks of a request's tokens.

    hash[i] = SHA-256(hash[i - 1] + token ids of block i as little-endian int64), where
    hash[-1] = SHA-256(adapter, salt, rope offset).

    If two hashes are equal, then adapter, salt, rope offset and all tokens up to the end of the block are equal. So one
    lookup compares a whole prefix, and a hit does not compare tokens again. Nobody can construct two token lists with
    one SHA-256 digest (FIPS 180-4). A chance collision among 2**64 blocks has a probability below 2**-128.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}q").pack

    def extend(self, request: Request, num_blocks: int) -> list[bytes]:
        """Fill request.block_hashes up to `num_blocks`, and return it. All tokens of these blocks must be known.

        Raises struct.error if a token id is not a 64-bit integer.
        """
        hashes, prompt, output = request.block_hashes, request.prompt_token_ids, request.output_token_ids
        assert num_blocks * self._block_size <= request.num_tokens, "a block with unknown tokens has no hash"
        size, num_prompt = self._block_size, len(prompt)
        parent = hashes[-1] if hashes else _seed(request.adapter, request.cache_salt, request.rope_offset)
        for start in range(len(hashes) * size, num_blocks * size, size):
            end = start + size
            if end <= num_prompt:
                tokens = prompt[start:end]
            elif start >= num_prompt:
                tokens = output[start - num_prompt : end - num_prompt]
            else:
                tokens = prompt[start:] + output[: end - num_prompt]
            parent = hashlib.sha256(parent + self._pack(*tokens)).digest()
            hashes.append(parent)
        return hashes


def _seed(adapter: str | None, cache_salt: str | None, rope_offset: int) -> bytes:
    """The start of the chain. repr() of these values is injective: different values never print the same text."""
    return hashlib.sha256(repr((adapter, cache_salt, rope_offset)).encode("utf-8", "surrogatepass")).digest()
