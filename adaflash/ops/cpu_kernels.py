# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of the `cpu` backend: fp32 loops on one thread, for ops that are too small to share.

A PyTorch call costs 5 to 20 us, and four times that between two large matmuls, which flush the caches; a plain step has
hundreds. Arguments are addresses; see `ops.compiled`.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from adaflash.ops.compiled import FAST, compiled, exp, floats, longs

_ZERO, _ONE = np.float32(0), np.float32(1)


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
    """Copy row r of x, n elements, to row `slots[r]` of the cache, both fp32.

    Raises:
        IndexError: A slot lies outside of the cache.
    """
    slot_of = carray(longs(slots), (num_rows,))
    for row in range(num_rows):
        if slot_of[row] < 0 or slot_of[row] >= num_slots:
            raise IndexError("slot_mapping points outside of the KV cache")
        source = carray(floats(x + 4 * row * row_stride), (n,))
        out = carray(floats(cache_ + 4 * slot_of[row] * n), (n,))
        for i in range(n):
            out[i] = source[i]
