# SPDX-License-Identifier: Apache-2.0
"""Paged attention of the `cpu` backend: a plan made once per step, run by every layer with PyTorch's flash kernel.

A kernel call costs as much as a few hundred keys, so sequences of like lengths share one call over keys gathered into
a workspace; a long sequence whose blocks lie in a row is read in place. Cache layout [num_blocks, block_size, Hkv, D].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from adaflash.ops.metadata import AttentionMetadata
from adaflash.ops.reference import attention_mask

# Measured (docs/adr/0002-cpu-backend.md): from here on a call of its own costs less than gathering the keys.
IN_PLACE_KEYS = 512
# Keys of one call, summed over its sequences: keeps the gathered keys and values inside the last-level cache.
MAX_GATHERED_KEYS = 2048
# Folding the query heads of a KV head into its rows reads the keys once; outside this range the copy costs more.
MIN_FOLDED_QUERIES, MAX_FOLDED_QUERIES = 2, 16


class PlanKey(NamedTuple):
    """What a plan depends on besides the batch."""

    causal: bool
    window: int | None
    block_size: int
    queries_per_kv: int
    dtype: torch.dtype


class Gather(NamedTuple):
    """Blocks copied into the workspace, and workspace rows of no key, which are zeroed: stale slots may hold NaN."""

    blocks: Tensor  # [num_seqs * blocks_per_seq] int64
    unused: Tensor | None  # int64 rows of [num_seqs * key_len]


@dataclass(frozen=True)
class Group:
    """Sequences of one kernel call; all have `query_len` queries and are padded to `key_len` keys.

    Attributes:
        rows: Packed rows of the queries, a slice where they are adjacent, else indices [num_seqs * query_len].
        first_slot: Slot of the first key when `gather` is None.
        mask: Additive, [num_seqs or 1, 1, rows per head, key_len] or None when every query sees every key.
    """

    num_seqs: int
    query_len: int
    key_len: int
    folded: bool
    rows: slice | Tensor
    first_slot: int
    gather: Gather | None
    mask: Tensor | None


class Sequence(NamedTuple):
    """One sequence with queries: `seq_len` keys, of which the first `hidden_len` are outside every window."""

    first_row: int
    query_len: int
    seq_len: int
    hidden_len: int
    blocks: list[int]

    @property
    def key_len(self) -> int:
        """Keys from the first visible block's start."""
        return self.seq_len - self.hidden_len


@dataclass(frozen=True)
class CpuAttentionMetadata(AttentionMetadata):
    """Attention lengths of a step and the plans its layers share; `plans` is filled by the first layer."""

    plans: dict[PlanKey, list[Group]] = field(default_factory=dict)

    def plan(self, key: PlanKey) -> list[Group]:
        """Return the kernel calls for `key`, made on first use."""
        if key not in self.plans:
            self.plans[key] = _make_plan(self, key)
        return self.plans[key]


def _make_plan(meta: AttentionMetadata, key: PlanKey) -> list[Group]:
    sequences = _sequences(meta, key)
    alone = [s for s in sequences if _runs_alone(s, len(sequences))]
    shared = [s for s in sequences if not _runs_alone(s, len(sequences))]
    return [_in_place_group(s, key) for s in alone] + [_gather_group(b, key) for b in _batches(shared, key)]


def _sequences(meta: AttentionMetadata, key: PlanKey) -> list[Sequence]:
    sequences, first_row = [], 0
    lengths = zip(meta.query_lens_cpu, meta.seq_lens_cpu, meta.block_tables_cpu, strict=True)
    for query_len, seq_len, table in lengths:
        if query_len:
            out_of_window = 0 if key.window is None else max(seq_len - query_len - key.window + 1, 0)
            first_block, end_block = out_of_window // key.block_size, -(-seq_len // key.block_size)
            hidden_len = first_block * key.block_size
            blocks = table[first_block:end_block]
            sequences.append(Sequence(first_row, query_len, seq_len, hidden_len, blocks))
        first_row += query_len
    return sequences


def _runs_alone(sequence: Sequence, num_seqs: int) -> bool:
    first = sequence.blocks[0]
    if sequence.key_len < IN_PLACE_KEYS and num_seqs > 1:
        return False
    return sequence.blocks == list(range(first, first + len(sequence.blocks)))


def _batches(sequences: list[Sequence], key: PlanKey) -> list[list[Sequence]]:
    """Split into batches of one query length and like key lengths, shortest first."""
    batches: list[list[Sequence]] = []
    for sequence in sorted(sequences, key=lambda s: (s.query_len, len(s.blocks))):
        batch = batches[-1] if batches else []
        fits = bool(batch) and batch[0].query_len == sequence.query_len
        fits = fits and sequence.query_len <= MAX_FOLDED_QUERIES
        fits = fits and (len(batch) + 1) * len(sequence.blocks) * key.block_size <= MAX_GATHERED_KEYS
        fits = fits and len(sequence.blocks) * key.block_size <= 2 * batch[0].key_len + 64
        if fits:
            batch.append(sequence)
        else:
            batches.append([sequence])
    return batches


def _in_place_group(sequence: Sequence, key: PlanKey) -> Group:
    folded = MIN_FOLDED_QUERIES <= sequence.query_len <= MAX_FOLDED_QUERIES
    return Group(
        num_seqs=1,
        query_len=sequence.query_len,
        key_len=sequence.key_len,
        folded=folded,
        rows=slice(sequence.first_row, sequence.first_row + sequence.query_len),
        first_slot=sequence.blocks[0] * key.block_size,
        gather=None,
        mask=_mask([sequence], sequence.key_len, folded, key),
    )


def _gather_group(batch: list[Sequence], key: PlanKey) -> Group:
    batch = sorted(batch, key=lambda s: s.first_row)
    num_blocks = max(len(s.blocks) for s in batch)
    query_len, key_len = batch[0].query_len, num_blocks * key.block_size
    blocks = torch.tensor([s.blocks + s.blocks[-1:] * (num_blocks - len(s.blocks)) for s in batch]).flatten()
    used = torch.arange(key_len) < torch.tensor([s.key_len for s in batch])[:, None]  # [num_seqs, key_len]
    unused = (~used).flatten().nonzero().squeeze(1)
    folded = len(batch) > 1 or MIN_FOLDED_QUERIES <= query_len <= MAX_FOLDED_QUERIES
    return Group(
        num_seqs=len(batch),
        query_len=query_len,
        key_len=key_len,
        folded=folded,
        rows=_rows(batch),
        first_slot=0,
        gather=Gather(blocks, unused if unused.numel() else None),
        mask=_mask(batch, key_len, folded, key),
    )


def _rows(batch: list[Sequence]) -> slice | Tensor:
    query_len, first_row = batch[0].query_len, batch[0].first_row
    if all(s.first_row == first_row + i * query_len for i, s in enumerate(batch)):
        return slice(first_row, first_row + len(batch) * query_len)
    return (torch.tensor([s.first_row for s in batch])[:, None] + torch.arange(query_len)).flatten()


def _mask(batch: list[Sequence], key_len: int, folded: bool, key: PlanKey) -> Tensor | None:
    """Return the additive mask of a call, or None if it would hide nothing."""
    query_len = batch[0].query_len
    visible = torch.zeros(len(batch), query_len, key_len, dtype=torch.bool)
    for row, sequence in zip(visible, batch, strict=True):
        full = attention_mask(query_len, sequence.seq_len, key.causal, key.window, visible.device)
        row[:, : sequence.key_len] = full[:, sequence.hidden_len :]
    if bool(visible.all()):
        return None
    mask = torch.zeros(visible.shape, dtype=key.dtype).masked_fill_(~visible, float("-inf"))
    if folded:  # rows (query, head of the KV head)
        mask = mask.repeat_interleave(key.queries_per_kv, dim=1)
    return mask[:, None]


def run_plan(plan: list[Group], q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """Attend q [T, Hq, D] to the cache, call by call, and return [T, Hq, D]; rows of no sequence are 0."""
    covered = sum(group.num_seqs * group.query_len for group in plan)
    out = torch.empty_like(q) if covered == q.shape[0] else torch.zeros_like(q)
    gathered = max((group.gather.blocks.numel() for group in plan if group.gather), default=0)
    workspace_k = k_cache.new_empty(gathered, *k_cache.shape[1:]) if gathered else k_cache
    workspace_v = v_cache.new_empty(gathered, *v_cache.shape[1:]) if gathered else v_cache
    for group in plan:
        keys = _keys(group, k_cache, workspace_k)
        values = _keys(group, v_cache, workspace_v)
        attend = _attend_folded if group.folded else _attend_single
        if isinstance(group.rows, slice):
            attend(group, q[group.rows], keys, values, scale, out[group.rows])
        else:
            rows = q.index_select(0, group.rows)
            attend(group, rows, keys, values, scale, rows)
            out.index_copy_(0, group.rows, rows)
    return out


def _keys(group: Group, cache: Tensor, workspace_: Tensor) -> Tensor:
    """Return the group's keys (or values), [num_seqs, key_len, Hkv, D], in place or gathered."""
    num_kv_heads, head_dim = cache.shape[2:]
    row = num_kv_heads * head_dim
    shape = (group.num_seqs, group.key_len, num_kv_heads, head_dim)
    strides = (group.key_len * row, row, head_dim, 1)
    if group.gather is None:
        return cache.as_strided(shape, strides, cache.storage_offset() + group.first_slot * row)
    gathered = workspace_[: group.gather.blocks.numel()]
    torch.index_select(cache, 0, group.gather.blocks, out=gathered)
    if group.gather.unused is not None:
        gathered.view(-1, row).index_fill_(0, group.gather.unused, 0.0)
    return gathered.as_strided(shape, strides)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    # The dispatcher of scaled_dot_product_attention costs 10 us a call and copies the keys of grouped queries.
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )[0]
    return out


def _attend_folded(group: Group, q: Tensor, k: Tensor, v: Tensor, scale: float, out_: Tensor) -> None:
    """Attend with the query heads of a KV head as rows: q, out_ [num_seqs * n, Hq, D], k, v [num_seqs, s, Hkv, D]."""
    num_seqs, query_len, num_kv_heads, head_dim = group.num_seqs, group.query_len, k.shape[2], k.shape[3]
    split = (num_seqs, query_len, num_kv_heads, -1, head_dim)
    folded = q.view(split).transpose(1, 2).reshape(num_seqs, num_kv_heads, -1, head_dim)  # rows (query, head)
    out = _flash(folded, k.transpose(1, 2), v.transpose(1, 2), group.mask, scale)
    out_.view(split).copy_(out.view(num_seqs, num_kv_heads, query_len, -1, head_dim).transpose(1, 2))


def _attend_single(group: Group, q: Tensor, k: Tensor, v: Tensor, scale: float, out_: Tensor) -> None:
    """Attend one sequence with KV heads as the batch: q, out_ [n, Hq, D], k, v [1, s, Hkv, D]."""
    num_kv_heads, head_dim = k.shape[2:]
    split = (group.query_len, num_kv_heads, -1, head_dim)
    rows = q.view(split).permute(1, 2, 0, 3)  # [Hkv, Hq / Hkv, n, D]
    queries_per_kv = rows.shape[1]
    k, v = (x[0].transpose(0, 1)[:, None].expand(-1, queries_per_kv, -1, -1) for x in (k, v))
    out = _flash(rows, k, v, group.mask, scale)
    out_.view(split).copy_(out.permute(2, 0, 1, 3))
