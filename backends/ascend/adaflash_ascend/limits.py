# SPDX-License-Identifier: Apache-2.0
"""What CANN's operators take on Atlas A2 and A3, checked on the host before a call.

A shape or dtype beyond a limit runs the reference body instead (`Exceeded`); a layout that nothing can run with is a
`BackendError`. Nothing here reads a device tensor's values.

Sources: Ascend/op-plugin, docs/zh/custom_APIs/torch_npu (one page per operator); for attention also
cann/ops-transformer, attention/fused_infer_attention_score (op_host tiling, tests), and vllm-ascend, attention_v1.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adaflash.errors import BackendError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ATTENTION_DTYPES = (torch.float16, torch.bfloat16)

BLOCK_SIZE = 128  # the only one that vllm-ascend runs with; the operator itself takes more
HEAD_DIMS = (128, 192)
MAX_HEADS = 256
MAX_HEAD_RATIO = 64
MAX_ROW_SIZE = 65535  # num_kv_heads * head_dim of a cache laid out [num_blocks, block_size, num_kv_heads * head_dim]
MAX_SEQS = 4096
MAX_DRAFT_WIDTH = 16  # rows of a sequence that drafts or verifies: vllm-ascend's bound; prefill chunks have none

MAX_ROPE_HEAD_DIM = 894
MAX_ROPE_HEADS = 999
MAX_TOP_K = 1024


class Exceeded(NamedTuple):
    """A limit in fixed words, and what exceeds it; arguments of `Backend.report_fallback`."""

    limit: str
    found: str


def _dtype(dtypes: Sequence[torch.dtype], *tensors: Tensor) -> Exceeded | None:
    """Return what is wrong unless all tensors share one of `dtypes`."""
    found = [tensor.dtype for tensor in tensors]
    if found[0] in dtypes and found.count(found[0]) == len(found):
        return None
    return Exceeded(f"one dtype of {_names(dtypes)}", f"dtypes {_names(found)}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> Exceeded | None:
    """Return what npu_rms_norm or npu_add_rms_norm cannot take, or None."""
    if weight.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        shapes = (tuple(x.shape), tuple(weight.shape), None if residual is None else tuple(residual.shape))
        return Exceeded("x and residual of one shape, weight of its last dimension", "shapes {} {} {}".format(*shapes))
    return _dtype(DTYPES, x, weight) if residual is None else _dtype(DTYPES, x, weight, residual)


def rope(q: Tensor, k: Tensor, rotary_dim: int) -> Exceeded | None:
    """Return what npu_rotary_mul cannot take, or None."""
    if q.shape[-1] != rotary_dim or k.shape[-1] != rotary_dim:
        return Exceeded("rotary_dim equal to head_dim", f"rotary_dim={rotary_dim} head_dim={q.shape[-1]}")
    if rotary_dim > MAX_ROPE_HEAD_DIM:
        return Exceeded(f"head_dim <= {MAX_ROPE_HEAD_DIM}", f"head_dim={rotary_dim}")
    num_heads = max(q.shape[1], k.shape[1])
    if num_heads > MAX_ROPE_HEADS:
        return Exceeded(f"at most {MAX_ROPE_HEADS} heads", f"{num_heads} heads")
    return _dtype(DTYPES, q, k)


def gated(gate_up: Tensor) -> Exceeded | None:
    """Return what npu_swiglu cannot take, or None."""
    return _dtype(DTYPES, gate_up)


def cache_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Exceeded | None:
    """Return what npu_scatter_pa_kv_cache cannot take, or None."""
    return _dtype(DTYPES, k, v, k_cache, v_cache) or _contiguous(k_cache, v_cache)


def _contiguous(*caches: Tensor) -> Exceeded | None:
    if all(cache.is_contiguous() for cache in caches):
        return None
    return Exceeded("contiguous caches", f"strides {[cache.stride() for cache in caches]}")


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, num_seqs: int, dtypes: Sequence[torch.dtype]
) -> Exceeded | None:
    """Return what npu_fused_infer_attention_score cannot take in layout TND with paged keys, or None.

    Args:
        q: [T, Hq, D].
        k_cache: [num_blocks, block_size, Hkv, D].
        v_cache: Same shape.
        num_seqs: Sequences with queries.
        dtypes: What it computes in.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    if head_dim not in HEAD_DIMS:
        return Exceeded(f"head_dim {' or '.join(map(str, HEAD_DIMS))}", f"head_dim={head_dim}")
    if block_size != BLOCK_SIZE:
        return Exceeded(f"block_size {BLOCK_SIZE}", f"block_size={block_size}")
    if num_heads % num_kv_heads or num_heads > min(MAX_HEADS, MAX_HEAD_RATIO * num_kv_heads):
        limit = f"at most {MAX_HEADS} query heads, a multiple, up to {MAX_HEAD_RATIO}, of the KV heads"
        return Exceeded(limit, f"{num_heads} query heads over {num_kv_heads} KV heads")
    if num_kv_heads * head_dim > MAX_ROW_SIZE:
        return Exceeded(f"KV heads * head_dim <= {MAX_ROW_SIZE}", f"{num_kv_heads} * {head_dim}")
    if num_seqs > MAX_SEQS:
        return Exceeded(f"at most {MAX_SEQS} sequences", f"{num_seqs} sequences")
    return _dtype(dtypes, q, k_cache, v_cache) or _contiguous(k_cache, v_cache)


def check_block_size(block_size: int) -> None:
    """Refuse any KV block size but the one attention is fast with.

    Raises:
        BackendError: Says which size it must be.
    """
    if block_size != BLOCK_SIZE:
        raise BackendError(f"block_size={block_size} is invalid on npu: must be {BLOCK_SIZE}; leave it out to get that")


def check_query_ends(query_ends: Sequence[int], num_rows: int) -> None:
    """Refuse cumulative query lengths that do not cover exactly the rows of a call.

    Raises:
        BackendError: They decrease, or the last one is not `num_rows`.
    """
    falls = any(end < start for start, end in zip([0, *query_ends], query_ends, strict=False))
    if falls or (query_ends[-1] if query_ends else 0) != num_rows:
        raise BackendError(
            f"cumulative query lengths {list(query_ends)} are invalid: must not decrease, "
            f"and end at {num_rows}, the number of rows"
        )
