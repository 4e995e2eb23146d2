# SPDX-License-Identifier: Apache-2.0
"""`write_kv` and `copy_blocks`, observed through `paged_attention`: the KV layout belongs to the backend."""

from __future__ import annotations

import pytest
import torch


def attend_with(backend, case, k_cache, v_cache):
    meta = backend.attention_metadata(case.batch(backend.device))
    q, scale = case.q.to(backend.device), case.heads.head_dim**-0.5
    return backend.paged_attention(q, k_cache, v_cache, meta, scale, True)[: case.num_queries]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100, 300])
def test_written_keys_are_read_back(num_tokens, dtype, backend, reference, paged_case, assert_close):
    case = paged_case([num_tokens], [num_tokens], dtype=dtype)
    assert_close(case.attend(backend), case.attend(reference))


@pytest.mark.parametrize("split", range(18))
def test_keys_may_be_written_in_pieces(split, backend, reference, paged_case, assert_close):
    case = paged_case([18], [18])
    k_cache, v_cache = (torch.zeros_like(cache) for cache in case.caches(backend))
    slots = case.slots(0, backend.device)
    keys, values = case.keys[0].to(backend.device), case.values[0].to(backend.device)
    for part in (slice(split, None), slice(0, split)):
        backend.write_kv(keys[part], values[part], k_cache, v_cache, slots[part])
    assert_close(attend_with(backend, case, k_cache, v_cache), case.attend(reference))


def test_writing_nothing_is_allowed(backend, paged_case):
    case = paged_case([1], [5])
    k_cache, v_cache = case.caches(backend)
    before = k_cache.clone()
    empty = case.keys[0][:0].to(backend.device)
    backend.write_kv(empty, empty, k_cache, v_cache, torch.empty(0, dtype=torch.int64, device=backend.device))
    assert torch.equal(k_cache.nan_to_num(), before.nan_to_num())


def test_keys_may_be_views_of_a_merged_projection(backend, reference, paged_case, assert_close):
    case = paged_case([9], [9])
    merged = torch.cat((case.q, case.keys[0], case.values[0]), dim=1).flatten(1).to(backend.device)
    widths = [x.shape[1] * x.shape[2] for x in (case.q, case.keys[0], case.values[0])]
    q, k, v = (x.unflatten(1, (-1, case.heads.head_dim)) for x in merged.split(widths, dim=1))
    k_cache, v_cache = (torch.zeros_like(cache) for cache in case.caches(backend))
    backend.write_kv(k, v, k_cache, v_cache, case.slots(0, backend.device))
    meta = backend.attention_metadata(case.batch(backend.device))
    scale = case.heads.head_dim**-0.5
    assert_close(backend.paged_attention(q, k_cache, v_cache, meta, scale, True), case.attend(reference))


def test_copied_blocks_hold_what_their_source_holds(dtype, backend, reference, paged_case, assert_close):
    case = paged_case([4], [2 * backend.preferred_block_size + 8], dtype=dtype)
    k_cache, v_cache = case.caches(backend)
    expected = case.attend(reference)
    spare = [b for b in range(case.num_blocks) if b not in case.block_tables[0]]
    pairs = list(zip(case.block_tables[0], spare, strict=False))
    assert len(pairs) == 3, "every block of the sequence is copied"
    backend.copy_blocks(k_cache, v_cache, pairs)
    case.block_tables[0][:] = [destination for _, destination in pairs]
    assert_close(attend_with(backend, case, k_cache, v_cache), expected)


def test_copying_no_blocks_changes_nothing(backend, paged_case):
    case = paged_case([1], [5])
    k_cache, v_cache = case.caches(backend)
    before = v_cache.clone()
    backend.copy_blocks(k_cache, v_cache, [])
    assert torch.equal(v_cache.nan_to_num(), before.nan_to_num())
