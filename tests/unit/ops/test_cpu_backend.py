# SPDX-License-Identifier: Apache-2.0
"""The cpu backend hands addresses to compiled kernels: what they cannot take must reach the reference body instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adaflash.ops.backend import Backend
from adaflash.ops.cpu import CpuBackend
from adaflash.speculative.packing import PackEntry, pack

CPU, REFERENCE = CpuBackend(), Backend()
BLOCK_SIZE, HKV, DIM = 4, 2, 8


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("x", "weight", "residual"),
    [
        (randn(3, 8), randn(16)[::2], None),
        (randn(3, 8), torch.ones(1).expand(8), randn(3, 8)),
        (randn(3, 8), randn(8), randn(8)),
        (randn(3, 16)[:, ::2], randn(8), randn(8, 3).T),
        (randn(2, 0), randn(0), None),
        (randn(0, 8), randn(8), None),
    ],
)
def test_rms_norm_of_any_layout(x, weight, residual):
    for got, want in zip(
        CPU.rms_norm(x, weight, 1e-5, residual), REFERENCE.rms_norm(x, weight, 1e-5, residual), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rows", [1, 3])
def test_rope_broadcasts_as_the_reference_does(rows):
    q, k, cos, sin = randn(3, 4, DIM), randn(3, HKV, DIM), randn(rows, 2), randn(rows, 2, seed=1)
    for got, want in zip(CPU.apply_rope(q, k, cos, sin), REFERENCE.apply_rope(q, k, cos, sin), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("k_rows", "half"),
    [(3, DIM), (2, 2)],
)
def test_rope_of_shapes_that_do_not_fit_is_an_error(k_rows, half):
    with pytest.raises(RuntimeError):
        CPU.apply_rope(randn(3, 4, DIM), randn(k_rows, HKV, DIM), randn(3, half), randn(3, half))


@pytest.mark.parametrize("gate_up", [randn(2, 3, 8), randn(3, 16)[:, ::2], randn(0, 8)])
def test_silu_of_any_layout(gate_up):
    torch.testing.assert_close(CPU.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))


def test_silu_of_an_odd_width_is_an_error():
    with pytest.raises(RuntimeError):
        CPU.silu_and_mul(randn(2, 7))


def test_silu_of_extreme_gates_is_that_of_the_reference():
    gate = torch.tensor([[-float("inf"), -1e38, -1e4, -100.0, -50.0, 100.0, 1e38, float("inf"), float("nan")]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    torch.testing.assert_close(
        CPU.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up), equal_nan=True, atol=1e-30, rtol=1e-5
    )


def caches(seed: int, num_blocks: int = 6) -> torch.Tensor:
    return randn(num_blocks, BLOCK_SIZE, HKV, DIM, seed=seed)


@pytest.mark.parametrize("slots", [torch.tensor([9, 0, 3, 0, 17, 0])[::2], torch.tensor([9, 3, 17], dtype=torch.int32)])
def test_kv_is_written_whatever_the_layout_of_slots(slots):
    written = []
    for backend, slot_mapping in ((CPU, slots), (REFERENCE, slots.long())):
        k_cache, v_cache = caches(1), caches(2)
        backend.write_kv(randn(3, HKV, DIM), randn(3, HKV, DIM, seed=9), k_cache, v_cache, slot_mapping)
        written.append((k_cache, v_cache))
    torch.testing.assert_close(*written)


def test_a_cache_with_gaps_is_an_error():
    both = torch.stack([caches(1), caches(2)], dim=1)
    with pytest.raises(RuntimeError):
        CPU.write_kv(randn(1, HKV, DIM), randn(1, HKV, DIM), both[:, 0], both[:, 1], torch.tensor([1]))


@pytest.mark.parametrize(
    ("slots", "heads", "dim"),
    [([1, 2], HKV, DIM), ([1, 2, 24], HKV, DIM), ([1, 2, 3], HKV + 1, DIM), ([1, 2, 3], HKV, DIM + 1)],
)
def test_kv_that_does_not_fit_is_an_error(slots, heads, dim):
    with pytest.raises((RuntimeError, IndexError)):
        CPU.write_kv(randn(3, heads, dim), randn(3, heads, dim), caches(1), caches(2), torch.tensor(slots))


@pytest.mark.parametrize("layout", ["int64 tables", "strided tables", "strided caches"])
def test_attention_of_any_layout(layout):
    entries = [PackEntry([1] * 2, 5, [3, 1], 1), PackEntry([1], 6, [0, 5], 1)]
    meta = CPU.attention_metadata(pack(entries, BLOCK_SIZE, torch.device("cpu")))
    k_cache, v_cache = caches(1), caches(2)
    if layout == "int64 tables":
        meta = replace(meta, block_tables=meta.block_tables.long())
    elif layout == "strided tables":
        meta = replace(meta, block_tables=torch.stack([meta.block_tables] * 2, dim=-1)[..., 0])
    else:
        both = torch.stack([k_cache, v_cache], dim=1)
        k_cache, v_cache = both[:, 0], both[:, 1]
    q = randn(3, 4, DIM)
    got = CPU.paged_attention(q, k_cache, v_cache, meta, 0.3, True)
    torch.testing.assert_close(got, REFERENCE.paged_attention(q, k_cache, v_cache, meta, 0.3, True))


def test_attention_to_a_block_that_does_not_exist_is_an_error():
    meta = CPU.attention_metadata(pack([PackEntry([1], 6, [0, 6], 1)], BLOCK_SIZE, torch.device("cpu")))
    with pytest.raises(IndexError):
        CPU.paged_attention(randn(1, 4, DIM), caches(1), caches(2), meta, 0.3, True)
