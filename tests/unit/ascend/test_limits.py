# SPDX-License-Identifier: Apache-2.0
"""CANN's limits: what is at one passes, what is beyond it is named."""

from __future__ import annotations

import pytest
import torch

from adaflash.errors import BackendError
from adaflash_ascend import limits


def exceeded_by(
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 128,
    num_seqs: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> limits.Exceeded | None:
    q = torch.empty(5, num_heads, head_dim, dtype=dtype, device="meta")
    cache = torch.empty(2, block_size, num_kv_heads, head_dim, dtype=cache_dtype, device="meta")
    return limits.attention(q, cache, cache, num_seqs, limits.ATTENTION_DTYPES)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"head_dim": 192},
        {"num_heads": 256, "num_kv_heads": 4},
        {"num_heads": 64, "num_kv_heads": 1},
        {"num_seqs": 4096},
        {"dtype": torch.float16, "cache_dtype": torch.float16},
    ],
)
def test_attention_at_its_limits(shape: dict[str, int]) -> None:
    assert exceeded_by(**shape) is None


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ({"head_dim": 64}, "head_dim=64"),
        ({"block_size": 64}, "block_size=64"),
        ({"num_heads": 257, "num_kv_heads": 257}, "257 query heads"),
        ({"num_heads": 65, "num_kv_heads": 1}, "65 query heads over 1"),
        ({"num_heads": 6, "num_kv_heads": 4}, "6 query heads over 4"),
        ({"num_seqs": 4097}, "4097 sequences"),
        ({"dtype": torch.float32, "cache_dtype": torch.float32}, "float32"),
        ({"cache_dtype": torch.float16}, "bfloat16, float16, float16"),
    ],
)
def test_attention_beyond_a_limit(shape: dict[str, int], found: str) -> None:
    exceeded = exceeded_by(**shape)
    assert exceeded is not None
    assert found in exceeded.found


def test_a_cache_must_be_contiguous() -> None:
    q = torch.empty(5, 4, 128, dtype=torch.bfloat16)
    cache = torch.empty(2, 2, 128, 128, dtype=torch.bfloat16).transpose(1, 2)
    exceeded = limits.attention(q, cache, cache, 1, limits.ATTENTION_DTYPES)
    assert exceeded is not None
    assert exceeded.limit == "contiguous caches"


@pytest.mark.parametrize(("num_heads", "head_dim", "fits"), [(999, 64, True), (1000, 64, False), (4, 896, False)])
def test_rope(num_heads: int, head_dim: int, fits: bool) -> None:
    q = torch.empty(3, num_heads, head_dim, device="meta")
    assert (limits.rope(q, q[:, :1], head_dim) is None) == fits


@pytest.mark.parametrize(
    ("x", "weight", "residual", "fits"),
    [
        ((3, 64), (64,), None, True),
        ((3, 2, 64), (64,), (3, 2, 64), True),
        ((3, 64), (32,), None, False),
        ((3, 64), (1, 64), None, False),
        ((3, 64), (64,), (1, 64), False),
    ],
)
def test_norm(x: tuple[int, ...], weight: tuple[int, ...], residual: tuple[int, ...] | None, fits: bool) -> None:
    tensors = [None if shape is None else torch.empty(shape) for shape in (x, weight, residual)]
    assert (limits.norm(*tensors) is None) == fits


def test_query_ends_must_cover_the_rows() -> None:
    limits.check_query_ends([3, 3, 8], 8)
    limits.check_query_ends([], 0)
    for query_ends, num_rows in (([3, 8], 9), ([3, 2, 8], 8), ([-1, 8], 8), ([], 1)):
        with pytest.raises(BackendError, match=f"must not decrease, and end at {num_rows}"):
            limits.check_query_ends(query_ends, num_rows)
