# SPDX-License-Identifier: Apache-2.0
"""The `npu` backend: each op as a call of torch_npu, or the reference body for what CANN cannot take.

Calls are given by keyword: names are checked against the schemas of torch_npu, positions are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from adaflash.ops import reference_sampling
from adaflash.ops.backend import Backend, MemoryInfo
from adaflash.ops.graph_shapes import GraphBuckets
from adaflash.ops.host_batch import StaticBatch
from adaflash.ops.metadata import (
    AttentionMetadata,
    NormOutput,
    PackedBatch,
    SamplingMetadata,
    VerifyMetadata,
    VerifyOutput,
    device_tensor,
)
from adaflash_ascend import limits
from adaflash_ascend.attention import (
    AscendAttentionMetadata,
    attend,
    attention_arguments,
    build_metadata,
    compressed_mask,
    sparsity,
)
from adaflash_ascend.graph import GraphCapture, graph_buckets
from adaflash_ascend.runtime import open_device
from adaflash_ascend.sampling import filtered

Output = TypeVar("Output")


class _Angles(NamedTuple):
    """Factors of npu_rotary_mul, [T, 1, D] each, and the cos and sin [T, D / 2] they were made of."""

    cos: Tensor
    sin: Tensor
    wide_cos: Tensor
    wide_sin: Tensor


def _needs_grad(*tensors: Tensor) -> bool:
    """Return whether a call must be differentiable: kernels here are for inference."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class AscendBackend(Backend):
    """Ascend backend, for one NPU; ASCEND_RT_VISIBLE_DEVICES says which.

    Args:
        device: `npu:0`, or another index.
        attention_dtypes: What the attention kernel computes in; other dtypes run the reference.
    """

    name = "npu"
    preferred_block_size = limits.BLOCK_SIZE
    max_draft_block_size = limits.MAX_DRAFT_WIDTH

    def __init__(
        self, device: str = "npu:0", attention_dtypes: Sequence[torch.dtype] = limits.ATTENTION_DTYPES
    ) -> None:
        open_device(device)
        super().__init__(device)
        self._attention_dtypes = tuple(attention_dtypes)
        self._mask = compressed_mask(self.device)
        self._graphs = GraphCapture()
        self._angles: _Angles | None = None

    # ---- ops -------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> NormOutput:
        """See `Backend.rms_norm`."""
        if not self._takes("rms_norm", limits.norm(x, weight, residual), x, weight):
            return super().rms_norm(x, weight, eps, residual)
        if residual is None:
            return NormOutput(torch.ops.npu.npu_rms_norm(input=x, gamma=weight, epsilon=eps)[0], x)
        normed, _, summed = torch.ops.npu.npu_add_rms_norm(x1=x, x2=residual, gamma=weight, epsilon=eps)
        return NormOutput(normed, summed)

    def apply_rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Backend.apply_rope`; angles are rounded to the dtype of q, as transformers does."""
        if not self._takes("apply_rope", limits.rope(q, k, 2 * cos.shape[1]), q, k):
            return super().apply_rope(q, k, cos, sin)
        angles = self._widened(cos, sin, q.dtype)
        rotated = [
            torch.ops.npu.npu_rotary_mul(input=x, r1=angles.wide_cos, r2=angles.wide_sin, rotary_mode="half")
            for x in (q, k)
        ]
        return rotated[0], rotated[1]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Backend.silu_and_mul`."""
        if not self._takes("silu_and_mul", limits.gated(gate_up), gate_up):
            return super().silu_and_mul(gate_up)
        out: Tensor = torch.ops.npu.npu_swiglu(input=gate_up.contiguous(), dim=-1)
        return out

    def write_kv(self, k: Tensor, v: Tensor, k_cache_: Tensor, v_cache_: Tensor, slot_mapping: Tensor) -> None:
        """See `Backend.write_kv`.

        The kernel writes slots that come twice in no order, and memory elsewhere for one that is not in the cache. Both
        are ruled out by block tables, which nothing here reads back from the device to make sure.
        """
        if not self._takes("write_kv", limits.cache_write(k, v, k_cache_, v_cache_), k, v):
            super().write_kv(k, v, k_cache_, v_cache_, slot_mapping)
            return
        torch.ops.npu.npu_scatter_pa_kv_cache(
            key=k.contiguous(),
            value=v.contiguous(),
            key_cache=k_cache_,
            value_cache=v_cache_,
            slot_mapping=slot_mapping,
            cache_mode="Norm",
        )

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        scale: float,
        causal: bool,
        window: int | None = None,
    ) -> Tensor:
        """See `Backend.paged_attention`."""
        exceeded = self._exceeded_attention(q, k_cache, v_cache, meta, causal)
        if not self._takes("paged_attention", exceeded, q):
            return super().paged_attention(q, k_cache, v_cache, meta, scale, causal, window)
        assert isinstance(meta, AscendAttentionMetadata), "metadata of another kind is a limit"
        num_rows = meta.query_ends[-1] if meta.query_ends else 0
        if not num_rows:
            return q.new_zeros(q.shape)
        keys = sparsity(causal, window, meta.max_query_len)
        rows = q[:num_rows].contiguous()
        if self._graphs.is_active:
            arguments = attention_arguments(rows, k_cache, v_cache, meta.tables, scale, self._mask, keys)
            out = self._graphs.attend(meta, arguments, torch.empty_like(rows))
        else:
            out = attend(rows, k_cache, v_cache, meta, scale, self._mask, keys)
        return out if num_rows == q.shape[0] else torch.cat((out, q.new_zeros(q.shape[0] - num_rows, *q.shape[1:])))

    def verify_drafts(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None,
        meta: VerifyMetadata,
        sampling: SamplingMetadata,
        draft_column_token_ids: Tensor | None = None,
    ) -> VerifyOutput:
        """See `Backend.verify_drafts`: under `gumbel` one `sample` of all rows and a comparison, all on the device."""
        if draft_logits is not None and not sampling.all_greedy:
            self.report_fallback("verify_drafts", "coupling gumbel", "coupling rejection")
        return super().verify_drafts(
            target_logits, draft_token_ids, draft_logits, meta, sampling, draft_column_token_ids
        )

    def copy_blocks(self, k_cache_: Tensor, v_cache_: Tensor, pairs: list[tuple[int, int]]) -> None:
        """See `Backend.copy_blocks`."""
        if not pairs:
            return
        sources, destinations = device_tensor(np.array(pairs, dtype=np.int64).T.copy(), self.device)
        for cache_ in (k_cache_, v_cache_):
            cache_.index_copy_(0, destinations, cache_.index_select(0, sources))

    def sample(self, logits: Tensor, sampling: SamplingMetadata) -> Tensor:
        """See `Backend.sample`: noise and argmax in PyTorch on the device, so that tokens are those of any other."""
        return reference_sampling.sample(logits, sampling, filtered)

    # ---- runtime ---------------------------------------------------------------------------------------------

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """See `Backend.kv_cache_shape`.

        Raises:
            BackendError: `block_size` is not 128.
        """
        limits.check_block_size(block_size)
        return (num_blocks, block_size, num_kv_heads, head_dim)

    def attention_metadata(self, batch: PackedBatch) -> AttentionMetadata:
        """See `Backend.attention_metadata`."""
        return build_metadata(batch)

    def graph_buckets(self, max_num_seqs: int, max_num_tokens: int) -> GraphBuckets:
        """See `Backend.graph_buckets`."""
        return graph_buckets(max_num_seqs, max_num_tokens)

    def capture(self, forward: Callable[[PackedBatch], Output], static: StaticBatch) -> Callable[[], Output]:
        """See `Backend.capture`."""
        return self._graphs.capture(forward, static)

    def memory_info(self) -> MemoryInfo:
        """See `Backend.memory_info`."""
        free, total = torch.get_device_module("npu").mem_get_info(self.device)
        return MemoryInfo(free, total)

    def preferred_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """Return bf16, or fp16 for a checkpoint of that: the attention kernel takes no other."""
        return torch.float16 if checkpoint_dtype is torch.float16 else torch.bfloat16

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _takes(self, op: str, exceeded: limits.Exceeded | None, *tensors: Tensor) -> bool:
        """Return whether the kernel runs; reports a limit, but neither gradients nor empty tensors, as a fallback."""
        if _needs_grad(*tensors) or not tensors[0].numel():
            return False
        if exceeded is not None:
            self.report_fallback(op, *exceeded)
        return exceeded is None

    def _exceeded_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: AttentionMetadata, causal: bool
    ) -> limits.Exceeded | None:
        if not isinstance(meta, AscendAttentionMetadata):
            return limits.Exceeded("metadata of this backend", type(meta).__name__)
        if not causal and meta.max_query_len > limits.MAX_DRAFT_WIDTH:
            limit = f"at most {limits.MAX_DRAFT_WIDTH} rows of a sequence that are not causal"
            return limits.Exceeded(limit, f"{meta.max_query_len} rows")
        return limits.attention(q, k_cache, v_cache, len(meta.key_lens), self._attention_dtypes)

    def _widened(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> _Angles:
        """Return cos and sin for both halves of a head; made once per forward, whose layers share the same tensors."""
        angles = self._angles
        if angles is None or angles.cos is not cos or angles.sin is not sin or angles.wide_cos.dtype is not dtype:
            wide = [torch.cat((x, x), dim=-1).to(dtype)[:, None] for x in (cos, sin)]
            angles = self._angles = _Angles(cos, sin, *wide)
        return angles
