"""Manages the pages of each request: prefix lookup, allocation, sharing between forks, registration for reuse."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add

from quire.errors import InvalidRequestError
from quire.formats.kv_groups import ONE_LAYER, KvGroup, longest_request, num_tables
from quire.request import Request
from quire.scheduler.block_hash import BlockHasher
from quire.scheduler.block_pool import BlockPool

NO_PAGE = -1  # stands in a block table for a block that no step reads any more


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a request's tokens that is in the KV cache already."""

    pages: Sequence[int]  # the pages of full blocks to share, in the order of BlockTable; they are never written again
    num_tokens: int  # the number of tokens that need no computation: the shared blocks and the head of `copy_from`
    copy_from: Sequence[int] = ()  # the pages of a block to copy: its first num_tokens % block_size slots are valid
    is_forgotten: bool = False  # computed before the cache was reset: no other request may find its later blocks


NO_PREFIX = Prefix((), 0)


@dataclass(slots=True)
class BlockTable:
    """The pages of one running request.

    Attributes:
        pages: the pages of its blocks, in the order of its tokens. Each block has one page for each block table of the
            model.
        num_tokens: the number of tokens for which the blocks have slots.
        num_sent: the number of entries of `pages` that the worker knows.
        reserved: pages for later blocks, in groups that keep all blocks.
        first_blocks: for each group, the first block that the request still holds. Earlier blocks were given back.
    """

    pages: list[int]
    num_tokens: int = 0
    num_sent: int = 0
    reserved: list[int] = field(default_factory=list)
    first_blocks: list[int] = field(default_factory=list)

    def take_new(self) -> list[int]:
        """The pages that the worker does not know yet. They count as sent from now on."""
        new = self.pages[self.num_sent :]
        self.num_sent = len(self.pages)
        return new

    def held(self) -> list[int]:
        """All pages that the request has a reference on, in the order of its tokens."""
        return [page for page in self.pages if page != NO_PAGE] + self.reserved


def share_prompt(parent: Request, child: Request) -> bool:
    """Whether a fork may share the KV of its parent. Everything on which the KV depends must be equal."""
    return (
        parent.prompt_token_ids == child.prompt_token_ids
        and parent.adapter == child.adapter
        and parent.cache_salt == child.cache_salt
        and parent.rope_offset == child.rope_offset
    )


class KVCacheManager:
    """Manages the block tables of the running requests over one BlockPool.

    Only full blocks are shared, and shared blocks are never written: a prefix ends before the first token to compute. A
    fork may start inside a block of its parent. Then it gets its own copy of this block when it is admitted. So
    copy-on-write happens only at admission.

    Some groups do not keep all blocks, for example a group of layers with a sliding window. Such a group has pages only
    for the blocks that the steps in flight and the next step read and write. Let t be the first token whose step has
    not ended. Blocks before the window of t are given back when pages are needed. They were registered before, because
    the steps that computed them have ended.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[KvGroup] = (ONE_LAYER,),
        *,
        step_tokens: int = 1,
        depth: int = 1,
        enable_prefix_caching: bool = True,
        watermark: float = 0.0,
    ) -> None:
        """Make a manager without requests. Raises ValueError if the watermark is not in [0, 1).

        Args:
            step_tokens: the most tokens of one request in a step. Groups that do not keep all have pages for them.
            depth: the most steps in flight.
            watermark: the share of pages that admission leaves free while other requests run.
        """
        if not 0 <= watermark < 1:
            raise ValueError(f"The watermark is a share of the KV blocks in [0, 1), got {watermark}.")
        self.pool = pool
        self.block_size = pool.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.longest_request = longest_request(groups, pool.num_blocks, pool.block_size, depth * step_tokens)
        self._bounded = [group for group in groups if not group.keeps_all and group.spec.kind != "state"]
        self._has_state = any(group.spec.kind == "state" for group in groups)
        self._width = num_tables(groups)
        ends = [num_tables(groups[: index + 1]) for index in range(len(groups))]
        self._columns = {group: range(end - group.num_tables, end) for group, end in zip(groups, ends, strict=True)}
        # The content of a block in one table is found by the hash of the block with a suffix for the table.
        self._suffixes = {
            column: column.to_bytes(2, "little") if column else b""
            for group, columns in self._columns.items()
            if group.spec.kind != "state"
            for column in columns
        }
        self._kept_columns = [column for group in groups if group.keeps_all for column in self._columns[group]]
        longest = pool.num_blocks * pool.block_size
        self._most_blocks = [
            group.most_blocks(longest, pool.block_size, depth * step_tokens) for group in self._bounded
        ]
        self.step_tokens = step_tokens if self._bounded else longest  # the most tokens of one request in a step
        self._num_watermark_pages = int(watermark * pool.num_blocks)
        self._hasher = BlockHasher(pool.block_size)
        self._tables: dict[str, BlockTable] = {}
        self._forgotten: set[str] = set()  # requests that hold blocks from before the cache was reset

    @property
    def usage(self) -> float:
        """The share of pages that running requests hold. Cached pages without an owner count as free."""
        return self.pool.num_used_blocks / self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks of tokens for which there are free pages. A block needs a page for each block table."""
        return self.pool.num_free_blocks // self._width

    @property
    def can_fork(self) -> bool:
        """Whether a fork can begin behind a part of its parent's tokens. A state is only that of all tokens so far."""
        return not self._has_state

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_pages_at_most(self, lengths: Sequence[int]) -> int:
        """The number of pages for requests of these lengths, if every group kept all blocks."""
        return self._width * sum(map(self.num_blocks_for, lengths))

    def table(self, request: Request) -> BlockTable:
        """The block table of an admitted request. Only the manager may change it."""
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
        """The longest prefix of full blocks that all groups have in the cache.

        At least one token is left to compute, because without it there are no logits. A group that does not keep all
        blocks needs only the blocks that the next token reads.
        """
        if not self.enable_prefix_caching or self._has_state:
            return NO_PREFIX
        num_blocks, width = (request.num_tokens - 1) // self.block_size, self._width
        hashes = self._hasher.extend(request, num_blocks)[:num_blocks]
        found: dict[int, list[int]] = {}  # block table -> its pages, from the first block that is read
        for column in self._kept_columns:
            found[column] = self._cached_beginning(hashes[:num_blocks], self._suffixes[column])
            num_blocks = len(found[column])
        before = -1
        while before != num_blocks:
            before = num_blocks
            for group in self._bounded:
                num_blocks = self._most_cached(group, hashes, num_blocks)
        pages = [NO_PAGE] * (num_blocks * width)
        for column in self._kept_columns:
            pages[column::width] = found[column][:num_blocks]
        for group in self._bounded:
            first = group.first_needed(num_blocks * self.block_size) // self.block_size
            for column in self._columns[group]:
                read = self._cached_beginning(hashes[first:num_blocks], self._suffixes[column])
                pages[first * width + column :: width] = read
        return Prefix(pages, num_blocks * self.block_size)

    def _cached_beginning(self, hashes: list[bytes], suffix: bytes) -> list[int]:
        """The pages of the blocks before the first one that is not cached."""
        lookup, pages = self.pool.lookup, []
        for block_hash in hashes:
            page = lookup(block_hash + suffix)
            if page is None:
                break
            pages.append(page)
        return pages

    def _most_cached(self, group: KvGroup, hashes: list[bytes], num_blocks: int) -> int:
        """The largest prefix, at most `num_blocks` blocks, after which all blocks that a request reads are cached.

        If a block is missing, then all prefixes that would read it fail. So the next try is the prefix that ends before
        this block. If nothing is cached, there is one lookup per window.
        """
        lookup, suffixes = self.pool.lookup, [self._suffixes[column] for column in self._columns[group]]
        while num_blocks > 0:
            first = group.first_needed(num_blocks * self.block_size) // self.block_size
            needed = range(first, num_blocks)
            missing = next((b for b in needed if any(lookup(hashes[b] + each) is None for each in suffixes)), None)
            if missing is None:
                break
            num_blocks = missing
        return num_blocks

    def fork_prefix(self, parent: Request) -> Prefix | None:
        """The prefix that a fork shares with a parent whose prompt is computed: all tokens but the last one.

        The fork computes the last token itself, to get its logits. `can_fork` must hold. None: the parent has given
        back blocks that the fork would read.
        """
        num_tokens = parent.num_prompt_tokens - 1
        num_full_blocks, rest = divmod(num_tokens, self.block_size)
        table = self._tables[parent.request_id]
        if not self._holds(table, num_tokens):
            return None
        width = self._width
        pages = table.pages[: num_full_blocks * width]
        for group in self._bounded:
            first = group.first_needed(num_tokens) // self.block_size
            for column in self._columns[group]:
                pages[column : first * width : width] = [NO_PAGE] * first
        copy_from = table.pages[num_full_blocks * width :][:width] if rest else ()
        return Prefix(pages, num_tokens, copy_from, parent.request_id in self._forgotten)

    def _holds(self, table: BlockTable, position: int) -> bool:
        """Whether the table still holds all blocks that the token at `position` reads."""
        return all(
            first <= group.first_needed(position) // self.block_size
            for group, first in zip(self._bounded, table.first_blocks, strict=True)
        )

    def admit(
        self, request: Request, prefix: Prefix, num_tokens: int, *, keep_watermark: bool
    ) -> list[tuple[int, int]] | None:
        """Give `request` its block table: the pages of the prefix, and new pages for `num_tokens` tokens in all.

        A group that does not keep all blocks gets only the pages of the next steps.

        Returns:
            Page copies (source, destination) that must run before the request computes. None: there are too few free
            pages, and nothing has changed.
        """
        pool = self.pool
        if not self.has_room(prefix, num_tokens, keep_watermark=keep_watermark):
            return None
        assert request.request_id not in self._tables, f"{request.request_id} is admitted twice"
        first_blocks, end, num_placed, num_reserved = self._needed(prefix, num_tokens)
        pool.acquire([page for page in prefix.pages if page != NO_PAGE])
        table = BlockTable(list(prefix.pages), first_blocks=first_blocks)
        self._place(table, pool.allocate(num_placed), end)
        table.reserved = pool.allocate(num_reserved)
        self._tables[request.request_id] = table
        if prefix.is_forgotten:
            self._forgotten.add(request.request_id)
        new = table.pages[len(prefix.pages) :][: len(prefix.copy_from)]
        return list(zip(prefix.copy_from, new, strict=True))

    def has_room(self, prefix: Prefix, num_tokens: int, *, keep_watermark: bool) -> bool:
        """Whether `admit` would find enough free pages for a request with these arguments."""
        _, _, num_placed, num_reserved = self._needed(prefix, num_tokens)
        num_shared = self.pool.num_free_among([page for page in prefix.pages if page != NO_PAGE])
        num_left = self.pool.num_free_blocks - num_shared - num_placed - num_reserved
        return num_left >= (self._num_watermark_pages if keep_watermark else 0)

    def _needed(self, prefix: Prefix, num_tokens: int) -> tuple[list[int], int, int, int]:
        """What a request of `num_tokens` tokens needs after a prefix.

        Returns:
            The first block of each group that does not keep all, the end of the blocks that get pages, the number of
            new pages for them, and the number of pages that are reserved for later blocks.
        """
        num_blocks, num_shared = self.num_blocks_for(num_tokens), len(prefix.pages) // self._width
        first_blocks = [group.first_needed(prefix.num_tokens) // self.block_size for group in self._bounded]
        end = self._end(first_blocks, num_blocks)
        num_placed = (end - num_shared) * len(self._suffixes) + self._width - len(self._suffixes)
        return first_blocks, end, num_placed, (num_blocks - end) * len(self._kept_columns)

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Get slots for the first `num_tokens` tokens. Before that, blocks that no step will read are given back.

        False: there are slots for fewer tokens, because pages are missing or because a window holds no more.
        """
        table = self._tables[request.request_id]
        return num_tokens <= table.num_tokens or self._grow(table, request.num_settled_tokens, num_tokens)

    def _grow(self, table: BlockTable, position: int, num_tokens: int) -> bool:
        """See `extend`. The steps of all tokens before `position` have ended."""
        self._give_back(table, position)
        begin, end = len(table.pages) // self._width, self._end(table.first_blocks, self.num_blocks_for(num_tokens))

        def num_reserved(num_more: int) -> int:
            return min(num_more * len(self._kept_columns), len(table.reserved))

        def num_new(num_more: int) -> int:
            return num_more * len(self._suffixes) - num_reserved(num_more)

        num_more = bisect_right(range(1, end - begin + 1), self.pool.num_free_blocks, key=num_new)
        count = num_reserved(num_more)
        self._place(table, table.reserved[:count] + self.pool.allocate(num_new(num_more)), begin + num_more)
        del table.reserved[:count]
        return num_tokens <= table.num_tokens

    def _end(self, first_blocks: list[int], num_blocks: int) -> int:
        """The most blocks that a table may have. A group that does not keep all holds only what the next steps need."""
        return min(num_blocks, *map(add, first_blocks, self._most_blocks)) if first_blocks else num_blocks

    def _place(self, table: BlockTable, pages: list[int], end: int) -> None:
        """Append pages for the blocks up to `end`. A state (of a linear-attention layer) has a page only in block 0."""
        if self._has_state:
            left, blocks = iter(pages), range(len(table.pages) // self._width, end)
            cells = ((block, column) for block in blocks for column in range(self._width))
            pages = [next(left) if block == 0 or column in self._suffixes else NO_PAGE for block, column in cells]
        table.pages += pages
        table.num_tokens = end * self.block_size

    def _give_back(self, table: BlockTable, position: int) -> None:
        """Release the blocks that no token at `position` or later reads."""
        dead = []
        for index, group in enumerate(self._bounded):
            first = group.first_needed(position) // self.block_size
            for block in range(table.first_blocks[index], first):
                for column in self._columns[group]:
                    at = block * self._width + column
                    dead.append(table.pages[at])
                    table.pages[at] = NO_PAGE
            table.first_blocks[index] = max(table.first_blocks[index], first)
        self.pool.release(dead)

    def register_computed(self, request: Request, start: int, end: int) -> None:
        """Let other requests find the blocks that became full when the tokens start to end - 1 were computed.

        All these tokens must be known.
        """
        first, last = start // self.block_size, end // self.block_size
        if first == last or not self.enable_prefix_caching or request.request_id in self._forgotten:
            return
        hashes, pages = self._hasher.extend(request, last), self._tables[request.request_id].pages
        for block in range(first, last):
            for column, suffix in self._suffixes.items():
                page = pages[block * self._width + column]
                if page != NO_PAGE:  # the page may have been freed after this step was submitted
                    self.pool.register(page, hashes[block] + suffix)

    def free(self, request: Request) -> None:
        """Release all pages of a request, the last page first. So the beginning of a prefix stays cached longest."""
        self.pool.release(reversed(self._tables.pop(request.request_id).held()))
        self._forgotten.discard(request.request_id)

    def forget_cached_prefixes(self) -> None:
        """Reset the prefix cache.

        Later lookups find neither the blocks computed so far nor the blocks that running requests compute from them.
        """
        self.pool.forget_all()
        self._forgotten = set(self._tables)

    def check(self) -> None:
        """Assert the invariants of tables and pool together: for tests."""
        self.pool.check([table.held() for table in self._tables.values()])
