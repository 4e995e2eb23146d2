# SPDX-License-Identifier: Apache-2.0
"""Paged attention of the `cpu` backend for few (query, key) pairs: keys are read where they lie, by PyTorch's threads.

`cpu_attention` gathers keys for PyTorch's own kernel, which pays off where many queries share them.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from numba import carray
from torch import Tensor

from adaflash.ops.compiled import (
    FAST,
    compiled,
    compiled_callback,
    exp,
    fetch_and_add,
    float_of_bits,
    floats,
    ints,
    longs,
)
from adaflash.ops.cpu_attention import CpuAttentionMetadata
from adaflash.ops.openmp import parallel_region

_ZERO = np.float32(0)
_FIELDS = (
    *("q", "k_cache", "v_cache", "out", "cu_seqlens_q", "seq_lens", "block_tables"),
    *("num_seqs", "max_blocks", "num_blocks", "block_size", "num_heads", "num_kv_heads", "head_dim", "max_seq_len"),
    *("scale_bits", "causal", "window", "next_item", "is_outside"),
)
_NEXT_ITEM, _IS_OUTSIDE = _FIELDS.index("next_item"), _FIELDS.index("is_outside")

Floats32 = npt.NDArray[np.float32]
Ints32 = npt.NDArray[np.int32]


class _Task(ctypes.Structure):
    """What the threads share: `Backend.paged_attention`'s arguments, and the next (row, KV head) to be taken."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS]


@compiled("void(intp, intp, intp, intp, intp, intp, float32, float32[::1])", FAST)
def _score(q: int, keys: int, key_stride: int, first: int, end: int, n: int, scale: float, scores_: Floats32) -> None:
    """Write scale * q . k of keys `first` .. `end` - 1; four at a time, so that q is loaded once for them."""
    query = carray(floats(q), (n,))
    key = first
    while key + 4 <= end:
        k0, k1 = carray(floats(keys + key * key_stride), (n,)), carray(floats(keys + (key + 1) * key_stride), (n,))
        k2, k3 = (
            carray(floats(keys + (key + 2) * key_stride), (n,)),
            carray(floats(keys + (key + 3) * key_stride), (n,)),
        )
        dot0, dot1, dot2, dot3 = _ZERO, _ZERO, _ZERO, _ZERO
        for i in range(n):
            dot0 += query[i] * k0[i]
            dot1 += query[i] * k1[i]
            dot2 += query[i] * k2[i]
            dot3 += query[i] * k3[i]
        scores_[key], scores_[key + 1], scores_[key + 2], scores_[key + 3] = (
            dot0 * scale,
            dot1 * scale,
            dot2 * scale,
            dot3 * scale,
        )
        key += 4
    for last in range(key, end):
        k0, dot0 = carray(floats(keys + last * key_stride), (n,)), _ZERO
        for i in range(n):
            dot0 += query[i] * k0[i]
        scores_[last] = dot0 * scale


@compiled("void(float32[::1], intp, intp, intp, intp, intp, intp)", FAST)
def _add_values(weights: Floats32, values: int, value_stride: int, first: int, end: int, n: int, out_: int) -> None:
    """Add weight * v of values `first` .. `end` - 1; four at a time, so that the sum is loaded once for them."""
    out = carray(floats(out_), (n,))
    value = first
    while value + 4 <= end:
        v0 = carray(floats(values + value * value_stride), (n,))
        v1 = carray(floats(values + (value + 1) * value_stride), (n,))
        v2 = carray(floats(values + (value + 2) * value_stride), (n,))
        v3 = carray(floats(values + (value + 3) * value_stride), (n,))
        w0, w1, w2, w3 = weights[value], weights[value + 1], weights[value + 2], weights[value + 3]
        for i in range(n):
            out[i] += w0 * v0[i] + w1 * v1[i] + w2 * v2[i] + w3 * v3[i]
        value += 4
    for last in range(value, end):
        v0, w0 = carray(floats(values + last * value_stride), (n,)), weights[last]
        for i in range(n):
            out[i] += w0 * v0[i]


@compiled("void(intp, intp, intp, intp, int32[::1], intp, intp, intp, intp, intp, float32, float32[:, ::1])", FAST)
def _attend_row(
    q: int,
    keys: int,
    values: int,
    out_: int,
    table: Ints32,
    first: int,
    end: int,
    block_size: int,
    slot_bytes: int,
    head_dim: int,
    scale: float,
    scores_: Floats32,
) -> None:
    """Attend with a row's query heads of one KV head: scores of the visible keys, softmax, weighted sum of the values.

    q and out_ are [group, D], scores_ [group, >= end] is scratch. `keys` and `values` are those of the KV head in the
    cache's first slot; slots are `slot_bytes` apart. Visible are positions first .. end - 1.
    """
    group = len(scores_)
    blocks = range(first // block_size, (end + block_size - 1) // block_size)
    for block in blocks:
        start = block * block_size
        offset = (table[block] - block) * block_size * slot_bytes
        low, high = max(first, start), min(end, start + block_size)
        for head in range(group):
            _score(q + 4 * head * head_dim, keys + offset, slot_bytes, low, high, head_dim, scale, scores_[head])
    for head in range(group):
        largest = scores_[head, first]
        for key in range(first, end):
            largest = max(largest, scores_[head, key])
        total = _ZERO
        for key in range(first, end):
            scores_[head, key] = exp(scores_[head, key] - largest)
            total += scores_[head, key]
        for key in range(first, end):
            scores_[head, key] /= total
        out = carray(floats(out_ + 4 * head * head_dim), (head_dim,))
        for i in range(head_dim):
            out[i] = _ZERO
    for block in blocks:
        start = block * block_size
        offset = (table[block] - block) * block_size * slot_bytes
        low, high = max(first, start), min(end, start + block_size)
        for head in range(group):
            out_row = out_ + 4 * head * head_dim
            _add_values(scores_[head], values + offset, slot_bytes, low, high, head_dim, out_row)


@compiled_callback("void(intp)")
def _attend(task: int) -> None:
    """Attend with the (row, KV head) pairs this thread gets hold of, one KV head of a sequence after another."""
    f = carray(longs(task), (_IS_OUTSIDE + 1,))
    q, k_cache, v_cache, out, cu_seqlens_q, seq_lens, block_tables = f[0], f[1], f[2], f[3], f[4], f[5], f[6]
    num_seqs, max_blocks, num_blocks, block_size = f[7], f[8], f[9], f[10]
    num_heads, num_kv_heads, head_dim, max_seq_len = f[11], f[12], f[13], f[14]
    scale, causal, window = float_of_bits(np.int32(f[15])), f[16] != 0, f[17]
    group = num_heads // num_kv_heads
    slot_bytes = 4 * num_kv_heads * head_dim
    starts, lens = carray(ints(cu_seqlens_q), (num_seqs + 1,)), carray(ints(seq_lens), (num_seqs,))
    scores = np.empty((group, max_seq_len), dtype=np.float32)
    seq, checked = 0, -1
    while True:
        item = fetch_and_add(task + 8 * _NEXT_ITEM, 1)
        if item >= starts[num_seqs] * num_kv_heads:
            return
        while item >= starts[seq + 1] * num_kv_heads:  # items only grow
            seq += 1
        table = carray(ints(block_tables + 4 * seq * max_blocks), (max_blocks,))
        if seq != checked:
            for i in range((lens[seq] + block_size - 1) // block_size):
                if table[i] < 0 or table[i] >= num_blocks:
                    f[_IS_OUTSIDE] = 1
                    return
            checked = seq
        query_len = starts[seq + 1] - starts[seq]
        kv_head, query = divmod(item - starts[seq] * num_kv_heads, query_len)
        position = lens[seq] - query_len + query
        end = position + 1 if causal else lens[seq]
        first = max(position + 1 - window, 0) if window > 0 else 0
        offset = 4 * ((starts[seq] + query) * num_heads + kv_head * group) * head_dim
        head = 4 * kv_head * head_dim
        rows = q + offset, k_cache + head, v_cache + head, out + offset
        _attend_row(*rows, table, first, end, block_size, slot_bytes, head_dim, scale, scores)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: CpuAttentionMetadata,
    scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Attend in one compiled call, [T, Hq, D] -> [T, Hq, D]; see `Backend.paged_attention`.

    Tensors are contiguous fp32, lengths and tables contiguous int32; the caller checks it.

    Raises:
        IndexError: A block lies behind the cache.
    """
    out = torch.empty_like(q)
    (_, num_heads, head_dim), (num_blocks, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    num_seqs, max_blocks = meta.block_tables.shape
    lengths = meta.cu_seqlens_q.data_ptr(), meta.seq_lens.data_ptr(), meta.block_tables.data_ptr()
    pool = num_blocks, block_size, num_heads, num_kv_heads, head_dim
    task = _Task(
        *(q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()),
        *lengths,
        *(num_seqs, max_blocks),
        *pool,
        meta.max_seq_len,
        int(np.float32(scale).view(np.int32)),
        causal,
        window or 0,
    )
    parallel_region()(_attend.address, ctypes.addressof(task), torch.get_num_threads())
    if task.is_outside:
        raise IndexError("block_tables points behind the KV cache")
    return out
