# SPDX-License-Identifier: Apache-2.0
"""The compiled paged attention: the reference's result, the same bits whatever threads share the work."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.ops import openmp
from adaflash.ops.backend import Backend
from adaflash.ops.cpu import CpuBackend
from adaflash.ops.cpu_attention import CpuAttentionMetadata
from adaflash.ops.cpu_paged_attention import attend
from adaflash.speculative.packing import PackEntry, pack

CPU = CpuBackend()
BLOCK_SIZE, NUM_BLOCKS = 4, 40


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def metadata(lengths: list[tuple[int, int]], seed: int = 0) -> CpuAttentionMetadata:
    """Of sequences of (query, context) tokens, in blocks of their own in random order."""
    blocks = list(range(NUM_BLOCKS))
    random.Random(seed).shuffle(blocks)
    entries = []
    for num_queries, num_context in lengths:
        needed = -(-(num_queries + num_context) // BLOCK_SIZE)
        entries.append(PackEntry([1] * num_queries, num_context, [blocks.pop() for _ in range(needed)], 1))
    meta = CPU.attention_metadata(pack(entries, BLOCK_SIZE, torch.device("cpu")))
    assert isinstance(meta, CpuAttentionMetadata)
    return meta


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5),
    group=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 12)),
)
def test_it_is_the_reference_and_the_same_bits_on_any_number_of_threads(
    lengths: list[tuple[int, int]], group: int, num_kv_heads: int, causal: bool, window: int | None
) -> None:
    meta = metadata(lengths)
    q = randn(sum(num_queries for num_queries, _ in lengths), group * num_kv_heads, 8)
    caches = [randn(NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, 8, seed=seed) for seed in (1, 2)]
    results = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        results.append(attend(q, *caches, meta, 0.3, causal, window))
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], Backend().paged_attention(q, *caches, meta, 0.3, causal, window))


def test_it_runs_on_as_many_threads_as_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    used, region = [], openmp.parallel_region()

    def counting(function: int, data: int, num_threads: int) -> None:
        used.append(num_threads)
        region(function, data, num_threads)

    monkeypatch.setattr("adaflash.ops.cpu_paged_attention.parallel_region", lambda: counting)
    caches = [randn(NUM_BLOCKS, BLOCK_SIZE, 2, 8, seed=seed) for seed in (1, 2)]
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        attend(randn(1, 4, 8), *caches, metadata([(1, 7)]), 0.3, True, None)
    assert used == [1, 3]


def test_without_an_openmp_runtime_it_runs_on_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    meta, q = metadata([(3, 7), (1, 12)]), randn(4, 4, 8)
    caches = [randn(NUM_BLOCKS, BLOCK_SIZE, 2, 8, seed=seed) for seed in (1, 2)]
    expected = attend(q, *caches, meta, 0.3, True, None)
    monkeypatch.setattr(openmp, "_gomp_parallel", lambda: None)
    openmp.parallel_region.cache_clear()
    try:
        assert not openmp.has_threads()
        assert torch.equal(attend(q, *caches, meta, 0.3, True, None), expected)
    finally:
        openmp.parallel_region.cache_clear()


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS, 2**31 - 1])
def test_a_block_that_does_not_exist_is_an_error_whoever_meets_it(block: int) -> None:
    meta, q = metadata([(2, 6)] * 4), randn(8, 4, 8)
    caches = [randn(NUM_BLOCKS, BLOCK_SIZE, 2, 8, seed=seed) for seed in (1, 2)]
    tables = meta.block_tables.clone()
    tables[2, 1] = block
    with pytest.raises(IndexError, match="block_tables points behind the KV cache"):
        attend(q, *caches, replace(meta, block_tables=tables), 0.3, True, None)
