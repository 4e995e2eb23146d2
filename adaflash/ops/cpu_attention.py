# SPDX-License-Identifier: Apache-2.0
"""Paged attention of the `cpu` backend: a plan made once per step, run by every layer with PyTorch's flash kernel.

A kernel call costs as much as a few hundred keys, so sequences of like lengths share one call over keys gathered into
a workspace; a long sequence whose blocks lie in a row is read in place. Cache layout [num_blocks, block_size, Hkv, D].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.ops.metadata import AttentionMetadata

# Measured (docs/adr/0002-cpu-backend.md): from here on a call of its own costs less than gathering the keys.
IN_PLACE_KEYS = 384
# Keys of one call, summed over its sequences: keeps the gathered keys and values inside the last-level cache.
MAX_GATHERED_KEYS = 2048
# One sequence's query heads are folded into rows, so that its keys are read once, where that gains more than it costs.
MIN_FOLDED_KEYS, MAX_FOLDED_QUERIES = 1024, 16


class PlanKey(NamedTuple):
    """What a plan depends on besides the batch."""

    causal: bool
    window: int | None
    block_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class InPlace:
    """Keys of one sequence read where they are: how to view a cache as [1, Hkv, key_len, D]."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    offset: int

    def read(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, views of the caches."""
        return self._view(k_cache), self._view(v_cache)

    def _view(self, cache: Tensor) -> Tensor:
        return cache.as_strided(self.shape, self.strides, cache.storage_offset() + self.offset)


@dataclass(frozen=True)
class Gathered:
    """Keys of several sequences copied into a workspace that all layers share.

    Attributes:
        blocks: [num_seqs * blocks_per_seq] int64.
        unused: Workspace slots of no key, int64; zeroed, since stale slots may hold NaN. None if there are none.
        k: Workspace [num_seqs * blocks_per_seq, block_size, Hkv, D].
        v: Likewise.
        shape: [num_seqs, key_len, Hkv, D].
    """

    blocks: Tensor
    unused: Tensor | None
    k: Tensor
    v: Tensor
    shape: tuple[int, int, int, int]

    def read(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, [num_seqs, Hkv, key_len, D]."""
        return self._copy(k_cache, self.k), self._copy(v_cache, self.v)

    def _copy(self, cache: Tensor, workspace_: Tensor) -> Tensor:
        torch.index_select(cache, 0, self.blocks, out=workspace_)
        if self.unused is not None:
            workspace_.flatten(0, 1).index_fill_(0, self.unused, 0.0)
        return workspace_.view(self.shape).transpose(1, 2)


@dataclass(frozen=True)
class Group:
    """Sequences of one kernel call; those of fewer than `query_len` queries repeat their last one.

    Attributes:
        folded: Whether the query heads of a KV head become rows of one matrix, (query, head).
        rows: Packed rows of the queries, a slice where they are adjacent, else indices [num_seqs * query_len].
        kept: Indices into `num_seqs * query_len` that are no repetition; None if there is none.
        kept_rows: Packed rows of `kept`.
        source: Where the keys come from.
        mask: Additive, [num_seqs, 1, rows per head, key_len]; None when every query sees every key.
    """

    num_seqs: int
    query_len: int
    folded: bool
    rows: slice | Tensor
    kept: Tensor | None
    kept_rows: Tensor | None
    source: InPlace | Gathered
    mask: Tensor | None


class SequenceSpan(NamedTuple):
    """One sequence with queries: `seq_len` keys, of which the first `hidden_len`, whole blocks, no query sees."""

    first_row: int
    query_len: int
    seq_len: int
    hidden_len: int
    blocks: list[int]

    @property
    def key_len(self) -> int:
        """Number of keys that are read."""
        return self.seq_len - self.hidden_len


@dataclass(frozen=True)
class CpuAttentionMetadata(AttentionMetadata):
    """Attention lengths of a step, and the plans its layers share, each made by the first of them.

    `num_pairs`: (query, key) pairs of the step, a measure of its work.
    """

    num_pairs: int = 0
    plans: dict[PlanKey, list[Group]] = field(default_factory=dict)

    @cached_property
    def max_seq_len(self) -> int:
        """Largest KV length."""
        return max(self.seq_lens_cpu)

    @cached_property
    def has_plain_lengths(self) -> bool:
        """Whether lengths and tables lie in memory as the compiled kernel reads them."""
        lengths = (self.cu_seqlens_q, self.seq_lens, self.block_tables)
        return all(tensor.dtype is torch.int32 and tensor.is_contiguous() for tensor in lengths)

    def plan(self, key: PlanKey) -> list[Group]:
        """Return the kernel calls for `key`, made on first use."""
        if key not in self.plans:
            self.plans[key] = _make_plan(self, key)
        return self.plans[key]


def _make_plan(meta: AttentionMetadata, key: PlanKey) -> list[Group]:
    sequences = _sequences(meta, key)
    alone = [s for s in sequences if _reads_in_place(s, len(sequences))]
    batches = _batches([s for s in sequences if not _reads_in_place(s, len(sequences))], key)
    num_blocks = max((len(batch) * max(len(s.blocks) for s in batch) for batch in batches), default=0)
    shape = (num_blocks, key.block_size, key.num_kv_heads, key.head_dim)
    k, v = torch.empty(shape, dtype=key.dtype), torch.empty(shape, dtype=key.dtype)
    return [_in_place_group(s, key) for s in alone] + [_gathered_group(b, key, k, v) for b in batches]


def _sequences(meta: AttentionMetadata, key: PlanKey) -> list[SequenceSpan]:
    sequences, first_row = [], 0
    lengths = zip(meta.query_lens_cpu, meta.seq_lens_cpu, meta.block_tables_cpu, strict=True)
    for query_len, seq_len, table in lengths:
        if query_len:
            out_of_window = 0 if key.window is None else max(seq_len - query_len - key.window + 1, 0)
            first_block, end_block = out_of_window // key.block_size, -(-seq_len // key.block_size)
            hidden_len = first_block * key.block_size
            blocks = table[first_block:end_block]
            sequences.append(SequenceSpan(first_row, query_len, seq_len, hidden_len, blocks))
        first_row += query_len
    return sequences


def _reads_in_place(sequence: SequenceSpan, num_seqs: int) -> bool:
    first = sequence.blocks[0]
    if sequence.key_len < IN_PLACE_KEYS and num_seqs > 1:
        return False
    return sequence.blocks == list(range(first, first + len(sequence.blocks)))


def _query_class(sequence: SequenceSpan) -> int:
    """Return the power of two at or above the query length: repeating queries costs less than more calls."""
    return int(1 << (sequence.query_len - 1).bit_length())


def _batches(sequences: list[SequenceSpan], key: PlanKey) -> list[list[SequenceSpan]]:
    """Split into batches of like query and key lengths, shortest first; long queries run alone."""
    batches: list[list[SequenceSpan]] = []
    for sequence in sorted(sequences, key=lambda s: (_query_class(s), len(s.blocks))):
        batch = batches[-1] if batches else []
        key_len = len(sequence.blocks) * key.block_size
        if (
            batch
            and sequence.query_len <= MAX_FOLDED_QUERIES
            and _query_class(sequence) == _query_class(batch[0])
            and (len(batch) + 1) * key_len <= MAX_GATHERED_KEYS
            and key_len <= 2 * batch[0].key_len + 64
        ):
            batch.append(sequence)
        else:
            batches.append([sequence])
    return batches


def _is_folded(query_len: int, key_len: int) -> bool:
    return key_len >= MIN_FOLDED_KEYS and 1 < query_len <= MAX_FOLDED_QUERIES


def _in_place_group(sequence: SequenceSpan, key: PlanKey) -> Group:
    folded = _is_folded(sequence.query_len, sequence.key_len)
    row = key.num_kv_heads * key.head_dim
    source = InPlace(
        shape=(1, key.num_kv_heads, sequence.key_len, key.head_dim),
        strides=(sequence.key_len * row, key.head_dim, row, 1),
        offset=sequence.blocks[0] * key.block_size * row,
    )
    rows = slice(sequence.first_row, sequence.first_row + sequence.query_len)
    mask = _mask([sequence], sequence.query_len, sequence.key_len, folded, key)
    return Group(1, sequence.query_len, folded, rows, None, None, source, mask)


def _gathered_group(batch: list[SequenceSpan], key: PlanKey, k: Tensor, v: Tensor) -> Group:
    batch = sorted(batch, key=lambda s: s.first_row)
    num_blocks = max(len(s.blocks) for s in batch)
    query_len, key_len = max(s.query_len for s in batch), num_blocks * key.block_size
    blocks = torch.tensor([s.blocks + s.blocks[-1:] * (num_blocks - len(s.blocks)) for s in batch]).flatten()
    used = torch.arange(key_len) < torch.tensor([s.key_len for s in batch])[:, None]  # [num_seqs, key_len]
    unused = (~used).flatten().nonzero().squeeze(1)
    shape = (len(batch), key_len, key.num_kv_heads, key.head_dim)
    workspace = (k[: len(blocks)], v[: len(blocks)])
    source = Gathered(blocks, unused if unused.numel() else None, *workspace, shape)
    folded = len(batch) > 1 or _is_folded(query_len, key_len)
    mask = _mask(batch, query_len, key_len, folded, key)
    return Group(len(batch), query_len, folded, *_rows(batch, query_len), source, mask)


def _rows(batch: list[SequenceSpan], query_len: int) -> tuple[slice | Tensor, Tensor | None, Tensor | None]:
    """Return `Group.rows`, `Group.kept` and `Group.kept_rows`."""
    first_row = batch[0].first_row
    if all(s.query_len == query_len and s.first_row == first_row + i * query_len for i, s in enumerate(batch)):
        return slice(first_row, first_row + len(batch) * query_len), None, None
    query_lens = torch.tensor([s.query_len for s in batch])[:, None]
    query = torch.arange(query_len)
    rows = (torch.tensor([s.first_row for s in batch])[:, None] + query.minimum(query_lens - 1)).flatten()
    kept = (query < query_lens).flatten().nonzero().squeeze(1)
    return (rows, None, None) if len(kept) == len(rows) else (rows, kept, rows[kept])


def _mask(batch: list[SequenceSpan], query_len: int, key_len: int, folded: bool, key: PlanKey) -> Tensor | None:
    """Return the additive mask of a call, or None if it would hide nothing."""
    sees_all = key.window is None and (query_len == 1 or not key.causal)
    if sees_all and all(s.key_len == key_len for s in batch):
        return None
    key_lens, query_lens = torch.tensor([(s.key_len, s.query_len) for s in batch])[:, None].unbind(-1)  # [num_seqs, 1]
    query = torch.arange(query_len).minimum(query_lens - 1)
    query_pos = (key_lens - query_lens + query)[:, :, None]  # [num_seqs, query_len, 1]
    key_pos = torch.arange(key_len)
    hidden = key_pos >= key_lens[:, :, None]
    if key.causal:
        hidden = hidden | (key_pos > query_pos)
    if key.window is not None:
        hidden = hidden | (key_pos <= query_pos - key.window)
    mask = torch.zeros(len(batch), query_len, key_len, dtype=key.dtype).masked_fill_(hidden, float("-inf"))
    if folded:  # rows (query, head of the KV head)
        mask = mask.repeat_interleave(key.num_q_heads // key.num_kv_heads, dim=1)
    return mask[:, None]


def run_plan(plan: list[Group], q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """Attend q [T, Hq, D] to the cache, call by call, and return [T, Hq, D]; rows of no sequence are 0."""
    if len(plan) == 1 and isinstance(plan[0].rows, slice) and plan[0].rows == slice(0, q.shape[0]):
        return _attend(plan[0], q, *plan[0].source.read(k_cache, v_cache), scale)
    out = torch.zeros_like(q)
    for group in plan:
        keys, values = group.source.read(k_cache, v_cache)
        if isinstance(group.rows, slice):
            out[group.rows] = _attend(group, q[group.rows], keys, values, scale)
        else:
            attended = _attend(group, q.index_select(0, group.rows), keys, values, scale)
            if group.kept is None or group.kept_rows is None:
                out.index_copy_(0, group.rows, attended)
            else:
                out.index_copy_(0, group.kept_rows, attended.index_select(0, group.kept))
    return out


def _attend(group: Group, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend q [num_seqs * query_len, Hq, D] to k, v [num_seqs, Hkv, key_len, D]."""
    if not group.folded:
        rows = q.transpose(0, 1)[None]  # [1, Hq, query_len, D]
        return F.scaled_dot_product_attention(rows, k, v, group.mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
    num_seqs, num_kv_heads, _, head_dim = k.shape
    split = (num_seqs, group.query_len, num_kv_heads, -1, head_dim)
    rows = q.view(split).transpose(1, 2).reshape(num_seqs, num_kv_heads, -1, head_dim)
    # Called below the dispatcher, which adds 10 us and has nothing left to choose here.
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        rows, k, v, 0.0, False, attn_mask=group.mask, scale=scale
    )[0]
    split = (num_seqs, num_kv_heads, group.query_len, -1, head_dim)
    return out.view(split).transpose(1, 2).reshape(q.shape)
