# SPDX-License-Identifier: Apache-2.0
"""Writing keys and attending to them, on doubles that refuse what CANN forbids."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaflash.errors import BackendError
from adaflash.ops.backend import Backend, Fallback
from adaflash.ops.metadata import AttentionMetadata, PackedBatch
from adaflash.speculative.packing import PackEntry, pack
from adaflash_ascend.backend import AscendBackend

BLOCK_SIZE = 128


def make_batch(query_lens: list[int], seq_lens: list[int]) -> PackedBatch:
    """Sequences over consecutive blocks, from the last one down; those without queries are allowed."""
    tables, first = [], 1
    for seq_len in seq_lens:
        count = -(-seq_len // BLOCK_SIZE)
        tables.append(list(range(first, first + count))[::-1])
        first += count
    packed = pack(
        [PackEntry([0] * n, s - n, table or [0], 0) for n, s, table in zip(query_lens, seq_lens, tables, strict=True)],
        BLOCK_SIZE,
        torch.device("cpu"),
    )
    assert packed.num_tokens == sum(query_lens)
    return packed


def caches(batch: PackedBatch, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    num_blocks = max((block for table in batch.block_tables_cpu for block in table), default=0) + 2
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2)
    ]


def queries(num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, num_heads, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)


def attend(
    backend: Backend,
    batch: PackedBatch,
    causal: bool = True,
    window: int | None = None,
    num_heads: int = 4,
    head_dim: int = 128,
    padding_rows: int = 0,
) -> Tensor:
    k_cache, v_cache = caches(batch, 2, head_dim)
    q = queries(batch.num_tokens + padding_rows, num_heads, head_dim)
    meta = backend.attention_metadata(batch)
    out = backend.paged_attention(q, k_cache, v_cache, meta, 0.1, causal, window)
    assert out.shape == q.shape
    return out[: batch.num_tokens]


# ---- attention -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 16), st.integers(0, 300)), min_size=1, max_size=5),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 400),
    padding_rows=st.integers(0, 3),
)
def test_ragged_batches(
    lengths: list[tuple[int, int]],
    causal: bool,
    window: int | None,
    padding_rows: int,
    backend: AscendBackend,
    reference: Backend,
) -> None:
    batch = make_batch([n for n, _ in lengths], [n + context for n, context in lengths])
    actual = attend(backend, batch, causal, window, padding_rows=padding_rows)
    torch.testing.assert_close(actual, attend(reference, batch, causal, window), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 299, 300, 301])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_end_where_the_reference_ends_them(
    window: int, causal: bool, backend: AscendBackend, reference: Backend, calls: Counter[str]
) -> None:
    batch = make_batch([1, 3, 16], [300, 300, 130])
    actual, expected = (attend(b, batch, causal, window) for b in (backend, reference))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    assert calls == {"npu_fused_infer_attention_score": 1}


def test_prefill_chunks_may_be_longer_than_draft_blocks(backend: AscendBackend, reference: Backend) -> None:
    batch = make_batch([200, 1, 40], [260, 5, 40])
    actual, expected = (attend(b, batch) for b in (backend, reference))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def test_a_draft_block_wider_than_16_falls_back(backend: AscendBackend, reference: Backend) -> None:
    batch = make_batch([17], [40])
    with pytest.raises(BackendError, match=r"paged_attention natively for at most 16 rows .*found 17 rows"):
        attend(backend, batch, causal=False)
    backend.strict_ops = False
    torch.testing.assert_close(attend(backend, batch, causal=False), attend(reference, batch, causal=False))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_another_head_dim_falls_back(
    head_dim: int, backend: AscendBackend, reference: Backend, calls: Counter[str]
) -> None:
    backend.strict_ops = False
    batch = make_batch([1, 3], [300, 40])
    actual, expected = (attend(b, batch, head_dim=head_dim) for b in (backend, reference))
    torch.testing.assert_close(actual, expected)
    assert backend.fallbacks == {Fallback("paged_attention", "head_dim 128 or 192"): 1}
    assert not calls


def test_head_dim_192_runs_natively(backend: AscendBackend, reference: Backend) -> None:
    batch = make_batch([1, 3], [300, 40])
    actual, expected = (attend(b, batch, head_dim=192) for b in (backend, reference))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def test_metadata_of_another_backend_falls_back(backend: AscendBackend, reference: Backend) -> None:
    backend.strict_ops = False
    batch = make_batch([1, 3], [300, 40])
    k_cache, v_cache = caches(batch, 2, 128)
    q, meta = queries(4, 4, 128), Backend().attention_metadata(batch)
    assert type(meta) is AttentionMetadata
    args = (q, k_cache, v_cache, meta, 0.1, True)
    torch.testing.assert_close(backend.paged_attention(*args), reference.paged_attention(*args))
    assert sum(backend.fallbacks.values()) == 1


def test_a_batch_without_queries_calls_no_kernel(backend: AscendBackend, calls: Counter[str]) -> None:
    assert attend(backend, make_batch([0, 0], [5, 0]), padding_rows=2).shape == (0, 4, 128)
    assert not calls


def test_lengths_of_a_step_are_host_lists(backend: AscendBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([2, 0, 3], [10, 7, 300])

    def refuse(tensor: Tensor) -> None:
        raise AssertionError("the device was read")

    for name in ("tolist", "item", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, refuse)
    meta = backend.attention_metadata(batch)
    monkeypatch.undo()
    assert (meta.query_ends, meta.key_lens, meta.max_query_len) == ([2, 5], [10, 300], 3)
    assert meta.tables.dtype is torch.int32
    assert meta.tables.tolist() == [[1, 0, 0], [5, 4, 3]]


# ---- writing -------------------------------------------------------------------------------------------------------


def write(backend: Backend, slots: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    written = [torch.zeros(4, BLOCK_SIZE, 2, 128, dtype=dtype) for _ in range(2)]
    merged = queries(slots.shape[0], 5, 128, dtype)
    backend.write_kv(merged[:, :2], merged[:, 3:], written[0], written[1], slots)  # views, as of one projection
    return written


@given(slots=st.lists(st.integers(0, 4 * BLOCK_SIZE - 1), unique=True, max_size=20))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_go_to_their_slots(slots: list[int], backend: AscendBackend, reference: Backend) -> None:
    mapping = torch.tensor(slots, dtype=torch.int64)
    assert all(map(torch.equal, write(backend, mapping), write(reference, mapping)))


def test_slots_are_never_read_by_the_host(backend: AscendBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping, to_list = torch.tensor([3, 200, 4]), Tensor.tolist

    def checked(tensor: Tensor) -> object:
        assert tensor is not mapping, "the device was read"
        return to_list(tensor)

    monkeypatch.setattr(Tensor, "tolist", checked)
    write(backend, mapping)


def test_nothing_is_written_without_rows(backend: AscendBackend, calls: Counter[str]) -> None:
    assert not any(cache.any() for cache in write(backend, torch.empty(0, dtype=torch.int64)))
    assert not calls
