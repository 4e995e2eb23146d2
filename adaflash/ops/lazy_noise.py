# SPDX-License-Identifier: Apache-2.0
"""Argmax of scores plus Gumbel noise on the CPU: the result of evaluating all noise, at a fraction of the work.

Tokens whose score no noise can lift to the top get no bits, and only those that may beat the best so far get their
logarithms: with w >= 2^e, g = -log(-log1p(-w)) <= -log(w) <= -e log 2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from adaflash.ops.compiled import bits_of_float, compiled, floats, longs
from adaflash.ops.noise import MAX_UNIFORM, MULTIPLIERS, WEYL, WORD_MASK, NoiseRows

# Gumbel noise lies in [-2.82, 22.88]: a score this far below the largest one never wins.
_NOISE_SPAN = np.float32(25.8)

_SHIFT, _LOW = np.uint64(32), np.uint64(WORD_MASK)
_M0, _M1 = (np.uint64(multiplier) for multiplier in MULTIPLIERS)
_W0, _W1 = (np.uint64(increment) for increment in WEYL)
_HALF, _SCALE, _MAX_UNIFORM = np.float32(0.5), np.float32(2.0**-32), np.float32(MAX_UNIFORM)
_LN2 = np.float32(math.log(2))


def lazy_argmax(scores: Tensor, rows: NoiseRows, stream: int, token_ids: Tensor | None) -> Tensor:
    """Return argmax(scores + noise) per row, [n, V] fp32 CPU tensor -> [n]; lowest index on ties.

    Args:
        scores: -inf drops a column. A row whose maximum is not finite yields the argmax of its scores.
        rows: Keys of the n rows.
        stream: Which of the noise streams.
        token_ids: [V] token id of each column, or None when columns are token ids.

    Raises:
        ValueError: There is no column.
    """
    if not scores.shape[1]:
        raise ValueError("scores must have at least one column")
    scores = scores.float().contiguous()
    keys = torch.stack(rows, dim=1).long()  # [n, 3]
    picks = torch.empty(scores.shape[0], dtype=torch.int64)
    token_ids = None if token_ids is None else token_ids.long().contiguous()
    ids = 0 if token_ids is None else token_ids.data_ptr()
    _argmax(scores.data_ptr(), keys.data_ptr(), ids, picks.data_ptr(), stream, *scores.shape)
    return picks


@njit
def _philox(group: Any, row: Any, stream: Any) -> Any:
    """Return `noise.philox` of a group of tokens under a row's keys (seed, sample index, output index)."""
    c0, c1, c2, c3 = np.uint64(group), np.uint64(row[2]), np.uint64(row[1]), np.uint64(stream)
    k0, k1 = np.uint64(row[0]) & _LOW, np.uint64(row[0]) >> _SHIFT
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@njit
def _largest(scores: Any) -> Any:
    """Return the first index of the largest score, or of the first NaN."""
    best = 0
    for column in range(len(scores)):
        if scores[column] != scores[column]:
            return column
        if scores[column] > scores[best]:
            best = column
    return best


@compiled("void(intp, intp, intp, intp, intp, intp, intp)")
def _argmax(scores: int, keys: int, ids: int, picks_: int, stream: int, num_rows: int, num_columns: int) -> None:
    picks = carray(longs(picks_), (num_rows,))
    id_of = carray(longs(ids), (num_columns,))  # not read when ids is 0
    for r in range(num_rows):
        row, key = carray(floats(scores + 4 * r * num_columns), (num_columns,)), carray(longs(keys + 24 * r), (3,))
        picks[r] = _largest(row)
        top = row[picks[r]]
        if not np.isfinite(top):
            continue
        spacing = np.spacing(abs(top) + np.float32(32))  # of the fp32 sums that are compared
        best, group, words = -np.inf, -1, (_LOW, _LOW, _LOW, _LOW)
        for column in range(num_columns):
            if row[column] < top - _NOISE_SPAN - 2 * spacing:
                continue
            token = column if ids == 0 else id_of[column]
            if token >> 2 != group:
                group = token >> 2
                words = _philox(group, key, stream)
            w = min((np.float32(words[token & 3]) + _HALF) * _SCALE, _MAX_UNIFORM)
            exponent = (bits_of_float(w) >> 23) - 127
            if row[column] - exponent * _LN2 + 2 * spacing < best:
                continue
            total = row[column] + np.float32(-math.log(-math.log1p(-np.float64(w))))
            if total > best:
                best, picks[r] = total, column
