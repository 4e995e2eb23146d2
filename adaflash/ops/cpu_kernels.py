# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of the `cpu` backend: fp32 loops on one thread, for ops that are too small to share.

A PyTorch call costs 5 to 20 us, and four times that between two large matmuls, which flush the caches; a plain step has
hundreds. Arguments are addresses; see `ops.compiled`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray

from adaflash.ops.compiled import FAST, compiled, exp, floats, ints, longs

_ZERO, _ONE = np.float32(0), np.float32(1)

Floats32 = npt.NDArray[np.float32]


@compiled("void(intp, intp, intp, float32, intp, intp, intp, intp)", FAST)
def rms_norm(x: int, residual: int, weight: int, eps: float, normed_: int, summed_: int, num_rows: int, n: int) -> None:
    """See `Backend.rms_norm`; `residual` and `summed_` are 0 where there is none, all others [num_rows, n]."""
    w = carray(floats(weight), (n,))
    for row in range(num_rows):
        offset = 4 * row * n
        h, out = carray(floats(x + offset), (n,)), carray(floats(normed_ + offset), (n,))
        squares = _ZERO
        if residual != 0:
            r, total = carray(floats(residual + offset), (n,)), carray(floats(summed_ + offset), (n,))
            for i in range(n):
                total[i] = h[i] + r[i]
            h = total
        for i in range(n):
            squares += h[i] * h[i]
        inverse = _ONE / np.sqrt(squares / np.float32(n) + eps)
        for i in range(n):
            out[i] = h[i] * inverse * w[i]


@compiled("void(intp, intp, intp, intp)", FAST)
def silu_and_mul(gate_up: int, out_: int, num_rows: int, n: int) -> None:
    """See `Backend.silu_and_mul`; [num_rows, 2n] -> [num_rows, n]."""
    for row in range(num_rows):
        gate = carray(floats(gate_up + 8 * row * n), (n,))
        up = carray(floats(gate_up + 8 * row * n + 4 * n), (n,))
        out = carray(floats(out_ + 4 * row * n), (n,))
        for i in range(n):
            out[i] = gate[i] / (_ONE + exp(-gate[i])) * up[i]


@compiled("void(intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp)", FAST)
def apply_rope(
    q: int,
    q_stride: int,
    k: int,
    k_stride: int,
    cos: int,
    sin: int,
    rotated_q_: int,
    rotated_k_: int,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    half: int,
) -> None:
    """See `Backend.apply_rope`; rows of q and k are `*_stride` elements apart, their heads lie side by side."""
    for row in range(num_rows):
        c, s = carray(floats(cos + 4 * row * half), (half,)), carray(floats(sin + 4 * row * half), (half,))
        for head in range(num_heads + num_kv_heads):
            if head < num_heads:
                source, target = q + 4 * row * q_stride, rotated_q_ + 4 * row * num_heads * head_dim
                offset = 4 * head * head_dim
            else:
                source, target = k + 4 * row * k_stride, rotated_k_ + 4 * row * num_kv_heads * head_dim
                offset = 4 * (head - num_heads) * head_dim
            x = carray(floats(source + offset), (head_dim,))
            out = carray(floats(target + offset), (head_dim,))
            for i in range(half):
                first, second = x[i], x[half + i]
                out[i] = first * c[i] - second * s[i]
                out[half + i] = second * c[i] + first * s[i]
            for i in range(2 * half, head_dim):
                out[i] = x[i]


@compiled("void(intp, intp, intp, intp, intp, intp, intp)")
def write_rows(x: int, row_stride: int, slots: int, cache_: int, num_rows: int, n: int, num_slots: int) -> None:
    """Copy row r of x, n elements, to row `slots[r]` of the cache, both fp32; a slot of -1 is skipped.

    Raises:
        IndexError: A slot lies behind the cache.
    """
    slot_of = carray(longs(slots), (num_rows,))
    for row in range(num_rows):
        if slot_of[row] >= num_slots:
            raise IndexError("slot_mapping points behind the KV cache")
        if slot_of[row] >= 0:
            source = carray(floats(x + 4 * row * row_stride), (n,))
            out = carray(floats(cache_ + 4 * slot_of[row] * n), (n,))
            for i in range(n):
                out[i] = source[i]


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


@compiled(
    "void(intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, "
    "float32, boolean, intp)",
    FAST,
)
def paged_attention(
    q: int,
    k_cache: int,
    v_cache: int,
    out_: int,
    cu_seqlens_q: int,
    seq_lens: int,
    block_tables: int,
    num_seqs: int,
    max_blocks: int,
    num_blocks: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_seq_len: int,
    scale: float,
    causal: bool,
    window: int,
) -> None:
    """See `Backend.paged_attention`: q, out_ [T, Hq, D] contiguous; window 0 is none; int32 lengths and tables.

    Per query row and head: scores of the visible keys, softmax, weighted sum of the values, all where they lie.

    Raises:
        IndexError: A block lies behind the cache.
    """
    group = num_heads // num_kv_heads
    starts, lens = carray(ints(cu_seqlens_q), (num_seqs + 1,)), carray(ints(seq_lens), (num_seqs,))
    scores = np.empty((group, max_seq_len), dtype=np.float32)
    kv_row = 4 * num_kv_heads * head_dim  # bytes of a slot
    block_row = kv_row * block_size
    for seq in range(num_seqs):
        table = carray(ints(block_tables + 4 * seq * max_blocks), (max_blocks,))
        query_len = starts[seq + 1] - starts[seq]
        for i in range((lens[seq] + block_size - 1) // block_size):
            if table[i] < 0 or table[i] >= num_blocks:
                raise IndexError("block_tables points behind the KV cache")
        for query in range(query_len):
            position = lens[seq] - query_len + query
            end = position + 1 if causal else lens[seq]
            first = max(position + 1 - window, 0) if window > 0 else 0
            for kv_head in range(num_kv_heads):
                offset = 4 * ((starts[seq] + query) * num_heads + kv_head * group) * head_dim
                for block in range(first // block_size, (end + block_size - 1) // block_size):
                    start = block * block_size
                    keys = k_cache + (table[block] - block) * block_row + 4 * kv_head * head_dim
                    low, high = max(first, start), min(end, start + block_size)
                    for head in range(group):
                        _score(q + offset + 4 * head * head_dim, keys, kv_row, low, high, head_dim, scale, scores[head])
                for head in range(group):
                    largest = scores[head, first]
                    for key in range(first, end):
                        largest = max(largest, scores[head, key])
                    total = _ZERO
                    for key in range(first, end):
                        scores[head, key] = exp(scores[head, key] - largest)
                        total += scores[head, key]
                    for key in range(first, end):
                        scores[head, key] /= total
                    out = carray(floats(out_ + offset + 4 * head * head_dim), (head_dim,))
                    for i in range(head_dim):
                        out[i] = _ZERO
                for block in range(first // block_size, (end + block_size - 1) // block_size):
                    start = block * block_size
                    values = v_cache + (table[block] - block) * block_row + 4 * kv_head * head_dim
                    low, high = max(first, start), min(end, start + block_size)
                    for head in range(group):
                        out_row = out_ + offset + 4 * head * head_dim
                        _add_values(scores[head], values, kv_row, low, high, head_dim, out_row)
