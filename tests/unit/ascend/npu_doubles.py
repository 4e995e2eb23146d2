# SPDX-License-Identifier: Apache-2.0
"""Doubles of torch_npu's operators for CPU tensors: what their documentation says, and refusal of what it forbids.

They are registered under the recorded schemas, so that wrong keywords and types fail as they do in torch_npu.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

SCHEMAS = json.loads((Path(__file__).parent / "data" / "npu_schemas.json").read_text())["2.13.0"]["schemas"]


@contextmanager
def registered() -> Iterator[Counter[str]]:
    """Register the doubles; counts their calls by name."""
    calls: Counter[str] = Counter()
    library = torch.library.Library("npu", "FRAGMENT")
    for name, double in DOUBLES.items():
        if not hasattr(torch.ops.npu, name):
            library.define(SCHEMAS[name].rpartition("::")[2])
        library.impl(name, _counted(name, double, calls), "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def _counted(name: str, double: Callable[..., object], calls: Counter[str]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        calls[name] += 1
        return double(*args, **kwargs)

    return call


def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert input.dtype == gamma.dtype
    wide = input.float()
    rstd = (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    assert x1.shape == x2.shape
    assert x1.dtype == x2.dtype
    summed = x1 + x2
    return (*rms_norm(summed, gamma, epsilon), summed)


def rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    assert rotary_mode == "half"
    assert rotate is None
    assert r1.shape == r2.shape == (input.shape[0], 1, input.shape[2])
    assert r1.dtype == r2.dtype == input.dtype
    first, second = input.chunk(2, dim=-1)
    return input * r1 + torch.cat((-second, first), dim=-1) * r2


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.chunk(2, dim=dim)
    return torch.nn.functional.silu(gate) * up


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    assert cache_mode == "Norm"
    assert all(tensor.is_contiguous() for tensor in (key, value, key_cache, value_cache, slot_mapping))
    assert key.dtype == value.dtype == key_cache.dtype == value_cache.dtype
    slots = slot_mapping.numpy().tolist()  # tests watch who calls the tensor's own
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < key_cache.shape[0] * key_cache.shape[1] for slot in slots)
    for row, slot in enumerate(slots):
        block, offset = divmod(slot, key_cache.shape[1])
        key_cache[block, offset], value_cache[block, offset] = key[row], value[row]


def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """Layout TND over paged keys [num_blocks, block_size, Hkv * D]."""
    assert input_layout == "TND"
    assert actual_seq_lengths is not None
    assert actual_seq_lengths_kv is not None
    assert block_table is not None
    assert block_table.dtype is torch.int32
    assert block_table.shape[0] == len(actual_seq_lengths) == len(actual_seq_lengths_kv)
    assert actual_seq_lengths[-1] == query.shape[0]
    assert query.shape[2] in (128, 192)
    assert all(tensor.is_contiguous() for tensor in (query, key, value))
    assert key.shape[1] == block_size == 128
    if sparse_mode == 0:
        assert atten_mask is None
    else:
        assert atten_mask is not None
        assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    out, start = torch.empty_like(query), 0
    for s, (end, num_keys) in enumerate(zip(actual_seq_lengths, actual_seq_lengths_kv, strict=True)):
        used = block_table[s, : -(-num_keys // block_size)].long()
        k, v = (
            cache[used].view(len(used) * block_size, num_key_value_heads, -1)[:num_keys].float()
            for cache in (key, value)
        )
        groups = num_heads // num_key_value_heads
        rows = query[start:end].float()
        scores = torch.einsum("qhd,khd->hqk", rows, k.repeat_interleave(groups, 1)) * scale
        scores = scores.masked_fill(_hidden(sparse_mode, end - start, num_keys, pre_tokens, next_tokens), float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(groups, 1))
        out[start:end] = attended.to(query.dtype)
        start = end
    return out, query.new_zeros(1, dtype=torch.float32)


def _hidden(sparse_mode: int, num_queries: int, num_keys: int, pre_tokens: int, next_tokens: int) -> Tensor:
    """Return [num_queries, num_keys], True where a key is hidden; as in the operator's own tests."""
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if sparse_mode == 0:
        return ~everything
    shift = num_keys - num_queries
    if sparse_mode == 3:
        return everything.triu(1 + shift)
    assert sparse_mode == 4
    return everything.triu(1 + shift + next_tokens) | everything.tril(-1 + shift - pre_tokens)


def top_k_top_p(logits: Tensor, p: Tensor, k: Tensor) -> Tensor:
    assert k.dtype is torch.int32
    assert p.dtype == logits.dtype
    assert ((k >= 1) & (k <= min(1024, logits.shape[1]))).all()
    values, index = logits.sort(dim=-1, stable=True)
    kept_from = values.gather(-1, (values.shape[1] - k.long())[:, None])
    values = values.masked_fill(values < kept_from, float("-inf"))
    dropped = values.softmax(-1).cumsum(-1) <= 1 - p[:, None]
    dropped[:, -1] = False
    return torch.empty_like(values).scatter_(-1, index, values.masked_fill(dropped, float("-inf")))


DOUBLES: dict[str, Callable[..., object]] = {
    "npu_add_rms_norm": add_rms_norm,
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "npu_rms_norm": rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_swiglu": swiglu,
    "npu_top_k_top_p": top_k_top_p,
}
