"""The pool of KV-cache blocks: reference counts, an LRU list of free blocks and the map from content hash to block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.scheduler.residency import BlockResidency


class BlockPool:
    """Manages the blocks 0 to num_blocks - 1 of `block_size` slots each. Only the numbers of the blocks live here.

    A block with references is in use. A block without references is free, and stands in a doubly linked list, which two
    arrays hold. So a block is taken, returned and revived in O(1). A free block keeps its hash until it is handed out
    again, so `acquire` can revive it. Blocks without a hash are handed out first, and then the least recently used one.
    """

    def __init__(self, num_blocks: int, block_size: int, residency: BlockResidency | None = None) -> None:
        """Make a pool of free blocks. Raises ValueError unless both sizes are positive.

        Args:
            residency: is told which blocks are allocated and found; None: nobody is told.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"A block pool needs at least one block of at least one slot, got {num_blocks} x {block_size}."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free_blocks = num_blocks
        self.num_ever_used = 0  # only blocks below this number were ever used: fresh blocks come in ascending order
        self.residency = residency
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        # The free list is a ring that contains the sentinel `num_blocks`. The block next[sentinel] is handed out first.
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a prefix lookup can find, in use or free."""
        return len(self._block_of_hash)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this content, or None. It may be free: `acquire` it before allocating."""
        return self._block_of_hash.get(block_hash)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """The number of these blocks that are free: `acquire` would take them from the free list."""
        ref_counts = self._ref_counts
        return sum(1 for block in blocks if not ref_counts[block])

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks; there must be that many. Each gets one reference, and loses its cached content."""
        assert count <= self.num_free_blocks, f"{count} blocks wanted, {self.num_free_blocks} free"
        blocks = []
        for _ in range(count):
            block = self._next[self.num_blocks]
            self.num_ever_used += block == self.num_ever_used
            self._unlink(block)
            self._forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        self.num_free_blocks -= count
        if self.residency is not None:
            self.residency.on_allocated(blocks)
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block. A free block comes into use again with its content."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                self._unlink(block)
                self.num_free_blocks -= 1
            self._ref_counts[block] += 1
        if self.residency is not None:
            self.residency.on_accessed(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block. Blocks that become free are evicted later in the order given here."""
        for block in blocks:
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} was freed twice"
            if self._ref_counts[block] == 0:
                is_cached = self._hashes[block] is not None
                self._link_after(self._prev[self.num_blocks] if is_cached else self.num_blocks, block)
                self.num_free_blocks += 1

    def register(self, block: int, block_hash: bytes) -> None:
        """Let `lookup` find the content of a block in use. If blocks have the same content, it finds the first one."""
        assert self._ref_counts[block] > 0, f"block {block} is free: its content may be gone"
        if block_hash not in self._block_of_hash:
            assert self._hashes[block] is None, f"block {block} is registered under another content"
            self._block_of_hash[block_hash] = block
            self._hashes[block] = block_hash

    def forget_all(self) -> None:
        """Forget all cached content. Blocks in use stay in use."""
        for block in self._block_of_hash.values():
            self._hashes[block] = None
        self._block_of_hash.clear()
        if self.residency is not None:
            self.residency.forget()

    def free_blocks(self) -> list[int]:
        """The free blocks in the order in which they will be handed out. O(num_blocks): for tests and reports."""
        blocks, block = [], self._next[self.num_blocks]
        while block != self.num_blocks:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given the block tables of all owners. O(num_blocks): for tests."""
        owners = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block appears twice in one table: {table}"
            for block in table:
                owners[block] += 1
        assert owners == self._ref_counts, "reference counts differ from the number of tables that hold each block"
        free = self.free_blocks()
        assert sorted(free) == [b for b in range(self.num_blocks) if not owners[b]], (
            "the free list is not the unused blocks"
        )
        assert len(free) == self.num_free_blocks
        backward, block = [], self._prev[self.num_blocks]
        while block != self.num_blocks:
            backward.append(block)
            block = self._prev[block]
        assert backward[::-1] == free, "the free list reads differently in the two directions"
        cached = {h: b for b, h in enumerate(self._hashes) if h is not None}
        assert cached == self._block_of_hash, "hash map and hashes of blocks disagree"

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_of_hash[block_hash]
            self._hashes[block] = None
