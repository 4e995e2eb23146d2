# SPDX-License-Identifier: Apache-2.0
"""The `cpu` backend: reference bodies, with what PyTorch does faster on a CPU overridden."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.ops.backend import Backend, LinearFn, MemoryInfo
from adaflash.ops.cpu_attention import CpuAttentionMetadata, PlanKey, run_plan
from adaflash.ops.metadata import AttentionMetadata, PackedBatch

# oneDNN chooses its packed layout for this many rows; measured best or equal from 1 to 512 rows.
PACKED_ROWS = 32


class CpuBackend(Backend):
    """CPU backend."""

    name = "cpu"

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
        key = PlanKey(causal, window, k_cache.shape[1], q.shape[1] // k_cache.shape[2], q.dtype)
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

    def preferred_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """Return fp32: without bf16 units, bf16 is several times slower than fp32."""
        return torch.float32
