# SPDX-License-Identifier: Apache-2.0
"""The `cpu` backend: reference bodies, with what PyTorch does faster on a CPU overridden."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.ops.backend import Backend, LinearFn, MemoryInfo
from adaflash.ops.cpu_attention import CpuAttentionMetadata, PlanKey, run_plan
from adaflash.ops.metadata import AttentionMetadata, NormOutput, PackedBatch

# oneDNN chooses its packed layout for this many rows; measured best or equal from 1 to 512 rows.
PACKED_ROWS = 32

DEFAULT_KV_BYTES = 4 * 1024**3

# Up to here q and k are rotated in one go: half the calls, for one more copy.
MAX_JOINT_ROPE_ROWS = 128


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] fp32 by cos/sin [T, 1, rotary_dim / 2]."""
    half, head_dim = cos.shape[-1], x.shape[-1]
    sizes = (half, half) if head_dim == 2 * half else (half, half, head_dim - 2 * half)
    first, second, *rest = x.split_with_sizes(sizes, dim=-1)
    rotated = ((first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin))
    return torch.cat((*rotated, *rest), dim=-1)


class CpuBackend(Backend):
    """CPU backend."""

    name = "cpu"
    reference_is_native = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        # Huge pages for weights and caches: 8 % less time per token. PyTorch reads this at its first allocation.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        self._scalars: dict[float, Tensor] = {}
        self._checked_slots: Tensor | None = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> NormOutput:
        """See `Backend.rms_norm`."""
        if x.dtype != torch.float32:
            return super().rms_norm(x, weight, eps, residual)
        summed = x if residual is None else x + residual
        squares = (summed * summed).sum(-1, keepdim=True)  # [..., 1]
        inverse = torch.add(self._scalar(eps), squares, alpha=1 / x.shape[-1]).rsqrt_()
        return NormOutput((summed * inverse).mul_(weight), summed)

    def _scalar(self, value: float) -> Tensor:
        """Return a cached fp32 tensor of shape []."""
        if value not in self._scalars:
            self._scalars[value] = torch.tensor(value, dtype=torch.float32)
        return self._scalars[value]

    def apply_rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Backend.apply_rope`."""
        if q.dtype != torch.float32:
            return super().apply_rope(q, k, cos, sin)
        cos, sin = cos[:, None], sin[:, None]
        if q.shape[0] > MAX_JOINT_ROPE_ROWS:
            return _rotate(q, cos, sin), _rotate(k, cos, sin)
        joint = _rotate(torch.cat((q, k), dim=1), cos, sin)
        rotated_q, rotated_k = joint.split_with_sizes((q.shape[1], k.shape[1]), dim=1)
        return rotated_q, rotated_k

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Backend.silu_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def write_kv(self, k: Tensor, v: Tensor, k_cache_: Tensor, v_cache_: Tensor, slot_mapping: Tensor) -> None:
        """See `Backend.write_kv`; only slots of -1 need the reference's masks."""
        if slot_mapping is not self._checked_slots:  # All layers of a step pass the same tensor.
            if slot_mapping.numel() == 0 or int(slot_mapping.min()) < 0:
                super().write_kv(k, v, k_cache_, v_cache_, slot_mapping)
                return
            self._checked_slots = slot_mapping
        k_cache_.flatten(0, 1).index_copy_(0, slot_mapping, k)
        v_cache_.flatten(0, 1).index_copy_(0, slot_mapping, v)

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
        """See `Backend.paged_attention`; the reference runs for gradients and for metadata of another backend."""
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad)
        if needs_grad or not isinstance(meta, CpuAttentionMetadata):
            return super().paged_attention(q, k_cache, v_cache, meta, scale, causal, window)
        _, block_size, num_kv_heads, head_dim = k_cache.shape
        key = PlanKey(causal, window, block_size, q.shape[1], num_kv_heads, head_dim, q.dtype)
        return run_plan(meta.plan(key), q, k_cache, v_cache, scale)

    def attention_metadata(self, batch: PackedBatch) -> AttentionMetadata:
        """See `Backend.attention_metadata`."""
        return CpuAttentionMetadata(
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.block_tables,
            batch.query_lens_cpu,
            batch.seq_lens_cpu,
            batch.block_tables_cpu,
        )

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> LinearFn:
        """See `Backend.pack_linear`; fp32 weights go to oneDNN's blocked layout, for inference only."""
        if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return lambda x: F.linear(x, weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), PACKED_ROWS)
        pointwise = torch.ops.mkldnn._linear_pointwise.default

        def linear(x: Tensor) -> Tensor:
            out: Tensor = pointwise(x, packed, bias, "none", [], "")
            return out

        return linear

    def memory_info(self) -> MemoryInfo:
        """Return memory the kernel could hand out without swapping, and installed memory."""
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
        return MemoryInfo(free, total)

    def default_kv_cache_bytes(self, utilization: float) -> int:
        """Return at most 4 GiB: host memory is shared with everything else; pages count once they are written."""
        return min(DEFAULT_KV_BYTES, super().default_kv_cache_bytes(utilization))

    def preferred_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """Return fp32: without bf16 units, bf16 is several times slower than fp32."""
        return torch.float32
