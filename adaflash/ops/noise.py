# SPDX-License-Identifier: Apache-2.0
"""Counter-based noise: Philox4x32-10 bits, uniforms and Gumbel noise. Owns no state.

The bits of a token are word `token_id % 4` of Philox with key = seed and counter = (token_id // 4, output_index,
sample_index, stream). They become w = (fp32(bits) + 1/2) * 2^-32, at most 1 - 2^-24, and g = -log(-log1p(-w)): large g
comes from small w, where fp32 is finest. On the CPU the logarithms are taken in fp64 and rounded, as the vectorised
and the scalar fp32 logarithm differ in the last bit.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TOKEN_STREAM = 0  # noise of target tokens under `gumbel`, and of drafts
ACCEPT_STREAM = 1  # acceptance uniforms under `rejection`
RESIDUAL_STREAM = 2  # noise of residual and bonus tokens under `rejection`

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD_MASK = 0xFFFFFFFF
MAX_UNIFORM = 1.0 - 2.0**-24


class NoiseRows(NamedTuple):
    """What keys the noise of n rows: `seed`, `sample_index` and `output_index`, [n] int64 each."""

    seed: Tensor
    sample_index: Tensor
    output_index: Tensor


class Words(NamedTuple):
    """The four 32-bit words of a counter or a Philox output, as int64 tensors in [0, 2^32)."""

    c0: Tensor
    c1: Tensor
    c2: Tensor
    c3: Tensor


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return Philox4x32-10 of counters and keys that broadcast against each other, int64 in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    for step in range(10):
        k0, k1 = ((key[i] + step * WEYL[i]) & WORD_MASK for i in (0, 1))
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # int64 products wrap, their bits are right
        c0, c1, c2, c3 = (
            ((p1 >> 32) & WORD_MASK) ^ c1 ^ k0,
            p1 & WORD_MASK,
            ((p0 >> 32) & WORD_MASK) ^ c3 ^ k1,
            p0 & WORD_MASK,
        )
    return Words(c0, c1, c2, c3)


def row_bits(rows: NoiseRows, stream: int, groups: Tensor) -> Tensor:
    """Return the bits of tokens 4 * group + lane, [n] rows and [G] groups -> [n, G, 4] int64."""
    key = (rows.seed[:, None] & WORD_MASK, (rows.seed[:, None] >> 32) & WORD_MASK)
    stream_word = torch.full_like(rows.output_index, stream)
    words = philox(
        Words(groups[None], rows.output_index[:, None], rows.sample_index[:, None], stream_word[:, None]), key
    )
    shape = (rows.seed.shape[0], groups.shape[0])
    return torch.stack([word.expand(shape) for word in words], dim=-1)


def uniform(rows: NoiseRows, stream: int) -> Tensor:
    """Return one uniform per row in the open interval (0, 1), that of token 0, [n] fp32."""
    groups = torch.zeros(1, dtype=torch.int64, device=rows.seed.device)
    return _to_uniform(row_bits(rows, stream, groups)[:, 0, 0])


def gumbel(rows: NoiseRows, stream: int, num_columns: int, token_ids: Tensor | None) -> Tensor:
    """Return the Gumbel noise of every column in every row, [n, V] fp32.

    Args:
        rows: Keys of the n rows.
        stream: One of the streams above.
        num_columns: V.
        token_ids: [V] token id of each column, or None when columns are token ids.
    """
    if token_ids is None:
        groups = torch.arange(-(-num_columns // 4), device=rows.seed.device)
        bits = row_bits(rows, stream, groups).flatten(1)[:, :num_columns]
    else:
        lanes = (token_ids % 4)[None, :, None].expand(rows.seed.shape[0], -1, 1)
        bits = row_bits(rows, stream, token_ids // 4).gather(-1, lanes)[..., 0]
    w = _to_uniform(bits)
    wide = w.double() if w.device.type == "cpu" else w
    return -torch.log(-torch.log1p(-wide)).to(torch.float32)


def _to_uniform(bits: Tensor) -> Tensor:
    return ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=MAX_UNIFORM)
