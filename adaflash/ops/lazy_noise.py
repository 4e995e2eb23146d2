# SPDX-License-Identifier: Apache-2.0
"""Argmax of scores plus Gumbel noise on the CPU: the result of evaluating all noise, at a fraction of the work.

Per row, tokens whose score no noise can lift to the top get no bits, and only tokens that may hold the maximum get
their logarithms: the largest s + g has the smallest E / e^s with E = -log1p(-w) >= w, so a token with w / e^s above the
leader's E / e^s has lost. Bits are numpy uint64: about 0.6 ms for 49,152 tokens on one core.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adaflash.ops.noise import MAX_UNIFORM, MULTIPLIERS, WEYL, WORD_MASK, NoiseRows

# Gumbel noise lies in [-2.82, 22.88]: a score this far below the largest one never wins.
_NOISE_SPAN = 25.8
_MIN_EXPONENT = -80.0  # exp of less is subnormal, which costs ten times as much

_MAX_FEW = 2048  # tokens in reach up to which rows share their calls
_MAX_FLOAT = float(np.finfo(np.float32).max)

_Words = npt.NDArray[np.uint64]
_Floats = npt.NDArray[np.float32]
_Indices = npt.NDArray[np.int64]

_SHIFT = np.uint64(32)
_LOW = np.uint64(WORD_MASK)
_M0, _M1 = (np.uint64(multiplier) for multiplier in MULTIPLIERS)


class _Columns(NamedTuple):
    """Distinct counter words of some columns, and where each column's bits lie in the flattened [G, 4] words.

    `positions` None: column j has bits j.
    """

    groups: _Words
    positions: _Indices | None
    num_columns: int


def lazy_argmax(scores: Tensor, rows: NoiseRows, stream: int, token_ids: Tensor | None) -> Tensor:
    """Return argmax(scores + noise) per row, [n, V] fp32 CPU tensor -> [n]; lowest index on ties.

    Args:
        scores: -inf drops a column. A row whose maximum is not finite yields the argmax of its scores.
        rows: Keys of the n rows.
        stream: Which of the noise streams.
        token_ids: [V] token id of each column, or None when columns are token ids.
    """
    ids = None if token_ids is None else token_ids.numpy()
    columns = _all_columns(scores.shape[1]) if ids is None else _columns_of(ids)
    counters = _counters(rows, stream)
    picks = np.empty(scores.shape[0], dtype=np.int64)
    few: list[tuple[int, _Indices]] = []  # rows with few tokens in reach, and those
    for r, row in enumerate(scores.numpy()):
        top = float(row.max())
        if not math.isfinite(top):
            picks[r] = row.argmax()
            continue
        spacing = float(np.spacing(np.float32(abs(top) + 32)))  # of the fp32 sums compared in the end
        in_reach = row >= top - _NOISE_SPAN - 2 * spacing
        num_in_reach = np.count_nonzero(in_reach)
        if num_in_reach <= _MAX_FEW:
            few.append((r, np.flatnonzero(in_reach)))
        elif 8 * num_in_reach > row.size:
            picks[r] = _leader(row, top, _uniforms(counters[:, r], columns), spacing)
        else:
            kept = np.flatnonzero(in_reach)
            kept_columns = _columns_of(kept if ids is None else ids[kept])
            picks[r] = kept[_leader(row[kept], top, _uniforms(counters[:, r], kept_columns), spacing)]
    if few:
        picks[[r for r, _ in few]] = _few_argmax(scores.numpy(), few, counters, ids)
    return torch.from_numpy(picks)


def _counters(rows: NoiseRows, stream: int) -> _Words:
    """Return the key's two words, output index, sample index and stream of every row, [5, n]."""
    seed, sample_index, output_index = (key.numpy().astype(np.uint64) for key in rows)
    return np.stack([seed & _LOW, seed >> _SHIFT, output_index, sample_index, np.full_like(seed, stream)])


def _few_argmax(
    scores: _Floats, few: list[tuple[int, _Indices]], counters: _Words, ids: _Indices | None
) -> list[np.int64]:
    """Return argmax(scores + noise) over the given columns of the given rows: all their noise in one go."""
    sizes = [len(kept) for _, kept in few]
    row_of = np.repeat([r for r, _ in few], sizes)  # [N]
    column_of = np.concatenate([kept for _, kept in few])
    tokens = column_of if ids is None else ids[column_of]
    words = _philox(counters[:, row_of], (tokens >> 2).astype(np.uint64))
    bits = np.choose(tokens & 3, words).astype(np.float32)
    uniforms = np.minimum((bits + np.float32(0.5)) * np.float32(2.0**-32), np.float32(MAX_UNIFORM))
    sums = scores[row_of, column_of] + _noise(uniforms)
    ends = np.cumsum(sizes)
    segments = zip(ends - sizes, ends, strict=True)
    return [column_of[start + sums[start:end].argmax()] for start, end in segments]


def _leader(scores: _Floats, top: float, uniforms: _Floats, spacing: float) -> int:
    """Return argmax of scores + g(uniforms), where top is the largest score."""
    weights = torch.from_numpy(scores).sub(top).clamp_(min=_MIN_EXPONENT).exp_()
    ratios: _Floats = torch.div(torch.from_numpy(uniforms), weights).numpy()
    first = int(ratios.argmin())
    bound = -math.log1p(-float(uniforms[first])) / float(weights[first])
    slack = (1 + 1e-4) * math.exp(min(2 * spacing, 50.0))
    rivals = np.flatnonzero(ratios <= np.float32(min(bound * slack, _MAX_FLOAT)))
    return int(rivals[(scores[rivals] + _noise(uniforms[rivals])).argmax()])


def _noise(uniforms: _Floats) -> _Floats:
    noise: _Floats = -np.log(-np.log1p(-uniforms.astype(np.float64))).astype(np.float32)
    return noise


def _all_columns(num_columns: int) -> _Columns:
    return _Columns(np.arange(-(-num_columns // 4), dtype=np.uint64), None, num_columns)


def _columns_of(ids: _Indices) -> _Columns:
    """Return the columns with these token ids; neighbours of one group share its words."""
    groups = ids >> 2
    starts = np.empty(len(ids), dtype=bool)
    starts[:1] = True
    np.not_equal(groups[1:], groups[:-1], out=starts[1:])
    positions = (np.cumsum(starts) - 1) * 4 + (ids & 3)
    return _Columns(groups[starts].astype(np.uint64), positions, len(ids))


def _uniforms(counter: _Words, columns: _Columns) -> _Floats:
    """Return w of each column, as `noise` defines it."""
    uniforms = np.empty((len(columns.groups), 4), dtype=np.float32)
    for lane, words in enumerate(_philox(counter, columns.groups)):
        uniforms[:, lane] = words.view(np.int64)  # to fp32 from int64 is faster than from uint64
    flat = uniforms.reshape(-1)
    flat += np.float32(0.5)
    flat *= np.float32(2.0**-32)
    np.minimum(flat, np.float32(MAX_UNIFORM), out=flat)
    return flat[: columns.num_columns] if columns.positions is None else flat[columns.positions]


def _philox(counter: _Words, groups: _Words) -> tuple[_Words, _Words, _Words, _Words]:
    """Return `noise.philox` of groups [G] under one counter [5], scalars until they mix, or one each [5, G]."""
    c0, c1, c2, c3 = groups, *counter[2:]
    spare0, spare1 = np.empty_like(groups), np.empty_like(groups)
    for step in range(10):
        k0, k1 = ((counter[i] + np.uint64(step * WEYL[i])) & _LOW for i in (0, 1))
        if step < 3:  # some of the words may be scalars
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (p1 >> _SHIFT) ^ (c1 ^ k0), p1 & _LOW, (p0 >> _SHIFT) ^ (c3 ^ k1), p0 & _LOW
            continue
        p0, p1 = np.multiply(c0, _M0, out=spare0), np.multiply(c2, _M1, out=spare1)
        c1 ^= k0
        c3 ^= k1
        np.right_shift(p1, _SHIFT, out=c0)
        np.right_shift(p0, _SHIFT, out=c2)
        c0 ^= c1
        c2 ^= c3
        p1 &= _LOW
        p0 &= _LOW
        c1, c3, spare0, spare1 = p1, p0, c1, c3
    return c0, c1, c2, c3
