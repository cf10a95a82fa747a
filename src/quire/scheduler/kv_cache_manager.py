"""Which blocks each request owns: prefix lookup, allocation, sharing between forks, registration for reuse."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import InvalidRequestError
from quire.request import Request
from quire.scheduler.block_hash import BlockHasher
from quire.scheduler.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a request's tokens whose KV exists already."""

    blocks: Sequence[int]  # full blocks to share; never written again by anybody
    num_tokens: int  # what the request has for nothing: the shared blocks and the head of `copy_from`
    copy_from: int | None = None  # a block whose first num_tokens % block_size slots are to be copied
    is_forgotten: bool = False  # computed before the cache was reset: nobody else may find what follows from it


NO_PREFIX = Prefix((), 0)


def share_prompt(parent: Request, child: Request) -> bool:
    """Whether a fork may take over the parent's KV: not if anything differs that the KV depends on."""
    return (
        parent.prompt_token_ids == child.prompt_token_ids
        and parent.lora_name == child.lora_name
        and parent.cache_salt == child.cache_salt
        and parent.rope_offset == child.rope_offset
    )


class KVCacheManager:
    """Block tables of the running requests over one BlockPool.

    Only full blocks are shared, and nobody writes into a shared block: a prefix ends before the first token to compute.
    A fork that starts inside a block of its parent gets its own copy of that block when it is admitted, which is copy-
    on-write at the only moment at which it can be due.
    """

    def __init__(self, pool: BlockPool, *, enable_prefix_caching: bool = True, watermark: float = 0.0) -> None:
        """`watermark` is the share of blocks that admission leaves free while other requests run.

        Raises ValueError if it is not in [0, 1).
        """
        if not 0 <= watermark < 1:
            raise ValueError(f"The watermark is a share of the KV blocks in [0, 1), got {watermark}.")
        self.pool = pool
        self.block_size = pool.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_watermark_blocks = int(watermark * pool.num_blocks)
        self._hasher = BlockHasher(pool.block_size)
        self._tables: dict[str, list[int]] = {}
        self._forgotten: set[str] = set()  # requests that hold blocks from before the cache was reset

    @property
    def usage(self) -> float:
        """Share of blocks that running requests hold. Cached blocks without an owner count as free."""
        return self.pool.num_used_blocks / self.pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_table(self, request: Request) -> list[int]:
        """Blocks of an admitted request, in the order of its tokens; the manager's own list."""
        return self._tables[request.request_id]

    def hash_prompt(self, request: Request) -> None:
        """Hash the prompt ahead of the first lookup. Raises InvalidRequestError for an illegal token id."""
        if not self.enable_prefix_caching:
            return
        try:
            self._hasher.extend(request, request.num_prompt_tokens // self.block_size)
        except struct.error as error:
            raise InvalidRequestError(
                f"The prompt contains an illegal token id ({error})", expected="64-bit integers", param="prompt"
            ) from error

    def find_cached_prefix(self, request: Request) -> Prefix:
        """The longest cached run of full blocks that leaves a token to compute: without one there are no logits."""
        if not self.enable_prefix_caching:
            return NO_PREFIX
        num_full_blocks = (request.num_tokens - 1) // self.block_size
        blocks: list[int] = []
        for block_hash in self._hasher.extend(request, num_full_blocks)[:num_full_blocks]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            blocks.append(block)
        return Prefix(blocks, len(blocks) * self.block_size)

    def fork_prefix(self, parent: Request) -> Prefix:
        """What a fork takes over from a parent whose prompt is computed: all but the last token, for the logits."""
        num_tokens = parent.num_prompt_tokens - 1
        num_full_blocks, rest = divmod(num_tokens, self.block_size)
        table = self._tables[parent.request_id]
        copy_from = table[num_full_blocks] if rest else None
        return Prefix(table[:num_full_blocks], num_tokens, copy_from, parent.request_id in self._forgotten)

    def admit(
        self, request: Request, prefix: Prefix, num_tokens: int, *, keep_watermark: bool
    ) -> list[tuple[int, int]] | None:
        """Give `request` its block table: the prefix's blocks and new ones up to `num_tokens` tokens.

        Answers the block copies (source, destination) that must run before the request computes, or None, with nothing
        changed, if the free blocks do not suffice.
        """
        pool = self.pool
        num_new = self.num_blocks_for(num_tokens) - len(prefix.blocks)
        num_left = pool.num_free_blocks - pool.num_free_among(prefix.blocks) - num_new
        if num_left < (self._num_watermark_blocks if keep_watermark else 0):
            return None
        assert request.request_id not in self._tables, f"{request.request_id} is admitted twice"
        pool.acquire(prefix.blocks)
        new_blocks = pool.allocate(num_new)
        self._tables[request.request_id] = [*prefix.blocks, *new_blocks]
        if prefix.is_forgotten:
            self._forgotten.add(request.request_id)
        return [] if prefix.copy_from is None else [(prefix.copy_from, new_blocks[0])]

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Grow the table to `num_tokens` tokens: the new blocks, or None, with nothing changed, if too few are free."""
        table = self._tables[request.request_id]
        if num_tokens <= len(table) * self.block_size:
            return []
        num_new = self.num_blocks_for(num_tokens) - len(table)
        if num_new > self.pool.num_free_blocks:
            return None
        new_blocks = self.pool.allocate(num_new)
        table += new_blocks
        return new_blocks

    def register_computed(self, request: Request, start: int, end: int) -> None:
        """Let others find the blocks that got full while tokens start .. end - 1, all known by now, were computed."""
        first, last = start // self.block_size, end // self.block_size
        if first == last or not self.enable_prefix_caching or request.request_id in self._forgotten:
            return
        hashes, table = self._hasher.extend(request, last), self._tables[request.request_id]
        for index in range(first, last):
            self.pool.register(table[index], hashes[index])

    def free(self, request: Request) -> None:
        """Return all blocks, the last one first, so that the longest-lived part of a prefix is its beginning."""
        self.pool.release(reversed(self._tables.pop(request.request_id)))
        self._forgotten.discard(request.request_id)

    def forget_cached_prefixes(self) -> None:
        """Nothing computed so far is found by a lookup any more, nor what running requests will compute from it."""
        self.pool.forget_all()
        self._forgotten = set(self._tables)

    def check(self) -> None:
        """Assert the invariants of tables and pool together: for tests."""
        self.pool.check(self._tables.values())
