# SPDX-License-Identifier: Apache-2.0
"""Which KV block belongs to whom: reference counts, the prefix cache, copy-on-write. Host only, touches no tensor."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

ROOT_UID = 0
MIXED_CONTEXT = -1


class PrefixMatch(NamedTuple):
    """Cached blocks holding the longest known prefix of a prompt."""

    blocks: list[int]
    last_uid: int


@dataclass(slots=True)
class _Block:
    """State of one block.

    Attributes:
        ref_count: Sequences whose table holds the block.
        uid: Identity of the cached content, unique for ever; None when the block is not in the prefix cache.
        key: (uid of the content before it, its token ids), set with `uid`.
        context_id: Of the weights that wrote the drafter's rows, `MIXED_CONTEXT` if several did; None: not valid.
    """

    ref_count: int = 0
    uid: int | None = None
    key: tuple[int, tuple[int, ...]] | None = None
    context_id: int | None = None


class BlockManager:
    """Hands out KV blocks and remembers which of them hold reusable prefixes.

    A cached block is immutable: it leaves the prefix cache before its slots are handed out again. Freed cached blocks
    stay matchable until their memory is needed; the least recently freed goes first.

    Args:
        num_blocks: Size of the pool.
        block_size: Tokens per block.
        enable_prefix_caching: Whether equal prefixes share blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        assert num_blocks > 0, "the pool needs at least one block"
        assert block_size > 0, "a block holds at least one token"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self._cached: dict[tuple[int, tuple[int, ...]], int] = {}
        self._next_uid = ROOT_UID + 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones nobody uses included."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def ref_count(self, block: int) -> int:
        """Return how many tables hold `block`."""
        return self._blocks[block].ref_count

    def is_writable(self, block: int) -> bool:
        """Return whether exactly one table holds `block` and the prefix cache does not."""
        state = self._blocks[block]
        return state.ref_count == 1 and state.uid is None

    def are_writable(self, table: list[int], first: int) -> bool:
        """Return whether `table[first:]` are all writable."""
        for i in range(first, len(table)):  # No generator: this runs for every sequence and step.
            state = self._blocks[table[i]]
            if state.ref_count != 1 or state.uid is not None:
                return False
        return True

    def context_id(self, block: int) -> int | None:
        """Return which weights wrote the drafter's rows of a cached block, None when they are not valid."""
        return self._blocks[block].context_id

    def allocate(self, num_blocks: int, after: int | None = None) -> list[int] | None:
        """Take `num_blocks` exclusive blocks, or None (and take nothing) when there are not enough.

        Args:
            num_blocks: How many.
            after: Prefer the blocks following this one, so that tables stay consecutive runs.
        """
        if num_blocks > len(self._free):
            return None
        taken: list[int] = []
        for _ in range(num_blocks):
            block = self._pick(after)
            self._take(block)
            taken.append(block)
            after = block
        return taken

    def share(self, blocks: list[int]) -> None:
        """Add one reference to each of `blocks`, taking unused cached ones out of the free list."""
        for block in blocks:
            state = self._blocks[block]
            assert state.ref_count > 0 or state.uid is not None, "only used or cached blocks can be shared"
            if state.ref_count == 0:
                del self._free[block]
            state.ref_count += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference to each of `blocks`; the tail of a prefix is freed, and so evicted, before its head."""
        for block in reversed(blocks):
            state = self._blocks[block]
            assert state.ref_count > 0, "a block is released once per reference"
            state.ref_count -= 1
            if state.ref_count == 0:
                self._free[block] = None
                if state.uid is None:
                    self._free.move_to_end(block, last=False)

    def make_writable(self, table_: list[int], first: int) -> list[tuple[int, int]] | None:
        """Replace shared or cached blocks `table_[first:]` by private copies.

        Args:
            table_: A sequence's block table, changed in place.
            first: Index of the first block about to be written.

        Returns:
            `(source, destination)` pairs whose contents must be copied before the write, or None (and nothing
            changed) when there are not enough free blocks.
        """
        shared = [i for i in range(first, len(table_)) if not self.is_writable(table_[i])]
        if not shared:
            return []
        copies = self.allocate(len(shared))
        if copies is None:
            return None
        pairs = [(table_[i], copy) for i, copy in zip(shared, copies, strict=True)]
        self.release([table_[i] for i in shared])
        for i, copy in zip(shared, copies, strict=True):
            table_[i] = copy
        return pairs

    def match_prefix(self, token_ids: list[int], context_id: int | None = None) -> PrefixMatch:
        """Return the cached blocks of the longest full-block prefix of `token_ids`; takes no reference.

        Args:
            token_ids: A prompt.
            context_id: Stop at the first block whose drafter rows other weights wrote; None takes all.
        """
        blocks: list[int] = []
        uid = ROOT_UID
        if not self.enable_prefix_caching:
            return PrefixMatch(blocks, uid)
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            block = self._cached.get((uid, tuple(token_ids[start : start + self.block_size])))
            if block is None:
                break
            if context_id not in (None, self._blocks[block].context_id):
                break
            next_uid = self._blocks[block].uid
            assert next_uid is not None, "a block in the cache has an identity"
            blocks.append(block)
            uid = next_uid
        return PrefixMatch(blocks, uid)

    def register(self, block: int, parent_uid: int, token_ids: tuple[int, ...], context_id: int | None) -> int:
        """Put a full block whose rows are all committed into the prefix cache.

        Args:
            block: The block, held by the calling sequence.
            parent_uid: What `register` returned for the block before it (`ROOT_UID` for the first).
            token_ids: Its `block_size` tokens.
            context_id: Of the weights that wrote the drafter's rows; None when they are not valid.

        Returns:
            The content's identity, to be passed as `parent_uid` for the next block. When equal content is cached
            already its identity is returned. Then `block` stays private, unless one context wrote all its drafter rows
            and not the other's: what is registered last is of the version that requests get now.
        """
        assert len(token_ids) == self.block_size, "only full blocks are cached"
        if not self.enable_prefix_caching:
            return ROOT_UID
        key = (parent_uid, token_ids)
        state = self._blocks[block]
        known = self._cached.get(key)
        if known is not None:
            other = self._blocks[known]
            assert other.uid is not None, "a block in the cache has an identity"
            is_better = context_id not in (None, MIXED_CONTEXT, other.context_id)
            if known == block or not (is_better or (other.context_id is None and context_id is not None)):
                return other.uid
            uid, other.uid, other.key = other.uid, None, None
        else:
            uid, self._next_uid = self._next_uid, self._next_uid + 1
        state.uid, state.key, state.context_id = uid, key, context_id
        self._cached[key] = block
        return uid

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; blocks in use stay with their sequences."""
        for block in list(self._cached.values()):
            self._forget(block)

    def _pick(self, after: int | None) -> int:
        if after is not None and after + 1 in self._free and self._blocks[after + 1].uid is None:
            return after + 1
        return next(iter(self._free))

    def _take(self, block: int) -> None:
        del self._free[block]
        self._forget(block)
        self._blocks[block].ref_count = 1

    def _forget(self, block: int) -> None:
        state = self._blocks[block]
        if state.key is not None:
            del self._cached[state.key]
        state.uid, state.key, state.context_id = None, None, None
