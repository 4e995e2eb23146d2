# SPDX-License-Identifier: Apache-2.0
"""Runs a target over the paged cache, its blocks shuffled, step by step."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from adaflash.cache.kv_cache import KVCache
from adaflash.models.base import TargetModel, TargetOutput
from adaflash.ops.backend import Backend
from adaflash.ops.metadata import PackedBatch

BLOCK_SIZE = 4
NUM_BLOCKS = 64


class PagedRunner:
    """Feeds chunks of several sequences to a target; each sequence owns blocks scattered over the pool."""

    def __init__(self, model: TargetModel, num_seqs: int) -> None:
        config = model.config
        self.model = model
        self.kv = KVCache.allocate(
            model.backend, config.num_layers, NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim, model.dtype
        )
        blocks = list(range(NUM_BLOCKS))
        random.Random(0).shuffle(blocks)
        share = NUM_BLOCKS // num_seqs
        self.tables = [blocks[i * share : (i + 1) * share] for i in range(num_seqs)]
        self.lens = [0] * num_seqs

    def step(self, chunks: dict[int, list[int]], tap_layer_ids: tuple[int, ...] = ()) -> TargetOutput:
        """Append the chunk of each sequence named, packed in the order given."""
        positions = [range(self.lens[s], self.lens[s] + len(chunk)) for s, chunk in chunks.items()]
        slots = [
            self.tables[s][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for s, rows in zip(chunks, positions, strict=True)
            for p in rows
        ]
        for s, chunk in chunks.items():
            self.lens[s] += len(chunk)
        batch = self._batch(chunks, [p for rows in positions for p in rows], slots)
        meta = self.model.backend.attention_metadata(batch)
        return self.model.forward(batch.token_ids, batch.positions, batch.slot_mapping, meta, self.kv, tap_layer_ids)

    def logits(self, chunks: dict[int, list[int]]) -> list[Tensor]:
        """Return the logits of each sequence's chunk, [len, V]."""
        logits = self.model.compute_logits(self.step(chunks).hidden)
        return list(torch.split(logits, [len(chunk) for chunk in chunks.values()]))

    def _batch(self, chunks: dict[int, list[int]], positions: list[int], slots: list[int]) -> PackedBatch:
        query_lens = [len(chunk) for chunk in chunks.values()]
        seq_lens = [self.lens[s] for s in chunks]
        tables = [self.tables[s] for s in chunks]
        return PackedBatch(
            token_ids=torch.tensor([token for chunk in chunks.values() for token in chunk]),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens).int(),
            block_tables=torch.tensor(tables).int(),
            logits_indices=torch.arange(len(slots)),
            query_lens_cpu=query_lens,
            seq_lens_cpu=seq_lens,
            block_tables_cpu=tables,
        )


@pytest.fixture
def backend() -> Backend:
    return Backend("cpu")


@pytest.fixture
def paged_runner() -> type[PagedRunner]:
    return PagedRunner
