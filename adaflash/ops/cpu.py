# SPDX-License-Identifier: Apache-2.0
"""The `cpu` backend: reference bodies, with what PyTorch does faster on a CPU overridden."""

from __future__ import annotations

import os
from operator import mul
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.ops import cpu_kernels as kernels
from adaflash.ops.backend import Backend, LinearFn, MemoryInfo
from adaflash.ops.cpu_attention import CpuAttentionMetadata, PlanKey, run_plan
from adaflash.ops.cpu_linear import compiled_linear
from adaflash.ops.cpu_paged_attention import attend
from adaflash.ops.dot_tile import TILE_ROWS
from adaflash.ops.metadata import AttentionMetadata, NormOutput, PackedBatch
from adaflash.ops.openmp import has_threads

# oneDNN chooses its packed layout for this many rows; measured best or equal from 1 to 512 rows.
PACKED_ROWS = 32

DEFAULT_KV_BYTES = 4 * 1024**3

# Up to here compiled kernels beat those of PyTorch: silu on one thread, attention on all (ADR 11 in docs/adr).
MAX_COMPILED_SILU_ROWS = 16
MAX_COMPILED_PAIRS = 12_288  # (query, key) pairs of a step
MAX_COMPILED_PAIRS_ALONE = 2048  # where there is no OpenMP runtime


def _is_inference(*tensors: Tensor) -> bool:
    """Return whether all are fp32 and none needs a gradient: what compiled kernels take."""
    for tensor in tensors:  # noqa: SIM110 - `all` costs as much as a kernel
        if tensor.dtype is not torch.float32 or tensor.requires_grad:
            return False
    return True


def _has_adjacent_heads(x: Tensor) -> bool:
    """Return whether the heads of each row of x [T, heads, D] lie side by side."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


class CpuBackend(Backend):
    """CPU backend."""

    name = "cpu"
    reference_is_native = True
    packs_linears = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.row_multiple = TILE_ROWS if has_threads() else 1
        self._max_compiled_pairs = MAX_COMPILED_PAIRS if has_threads() else MAX_COMPILED_PAIRS_ALONE
        # Huge pages for weights and caches: 8 % less time per token. PyTorch reads this at its first allocation.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> NormOutput:
        """See `Backend.rms_norm`."""
        size = x.shape[-1]
        added = x if residual is None else residual
        has_shapes = weight.shape == (size,) and added.shape == x.shape and size > 0
        if not (has_shapes and weight.is_contiguous() and _is_inference(x, weight, added)):
            return super().rms_norm(x, weight, eps, residual)
        x = x.contiguous()
        normed, num_rows = torch.empty_like(x), x.numel() // size
        if residual is None:
            kernels.rms_norm(x.data_ptr(), 0, weight.data_ptr(), eps, normed.data_ptr(), 0, num_rows, size)
            return NormOutput(normed, x)
        residual, summed = residual.contiguous(), torch.empty_like(x)
        addresses = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
        kernels.rms_norm(*addresses, eps, normed.data_ptr(), summed.data_ptr(), num_rows, size)
        return NormOutput(normed, summed)

    def apply_rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Backend.apply_rope`."""
        num_rows, num_heads, head_dim = q.shape
        half = cos.shape[1]
        has_shapes = k.shape[0] == num_rows and k.shape[2] == head_dim and 2 * half <= head_dim
        has_shapes = has_shapes and cos.shape == sin.shape == (num_rows, half)
        if not (has_shapes and _is_inference(q, k, cos, sin) and _has_adjacent_heads(q) and _has_adjacent_heads(k)):
            return super().apply_rope(q, k, cos, sin)
        cos, sin, rotated_q, rotated_k = cos.contiguous(), sin.contiguous(), q.new_empty(q.shape), k.new_empty(k.shape)
        kernels.apply_rope(
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            rotated_q.data_ptr(),
            rotated_k.data_ptr(),
            num_rows,
            num_heads,
            head_dim,
            k.shape[1],
            half,
        )
        return rotated_q, rotated_k

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Backend.silu_and_mul`."""
        num_rows, size = gate_up.shape[0], gate_up.shape[-1] // 2
        is_small = gate_up.dim() == 2 and num_rows <= MAX_COMPILED_SILU_ROWS and gate_up.shape[1] == 2 * size
        if not (is_small and _is_inference(gate_up)):
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        gate_up, out = gate_up.contiguous(), gate_up.new_empty(num_rows, size)
        kernels.silu_and_mul(gate_up.data_ptr(), out.data_ptr(), num_rows, size)
        return out

    def write_kv(self, k: Tensor, v: Tensor, k_cache_: Tensor, v_cache_: Tensor, slot_mapping: Tensor) -> None:
        """See `Backend.write_kv`."""
        num_rows, num_heads, head_dim = k.shape
        has_shapes = k.shape == v.shape and k_cache_.shape == v_cache_.shape and k_cache_.shape[2:] == k.shape[1:]
        has_slots = slot_mapping.dtype is torch.int64 and slot_mapping.shape == (num_rows,)
        is_plain = slot_mapping.is_contiguous() and k_cache_.is_contiguous() and v_cache_.is_contiguous()
        is_plain = is_plain and _has_adjacent_heads(k) and _has_adjacent_heads(v)
        if not (has_shapes and has_slots and is_plain and _is_inference(k, v, k_cache_, v_cache_)):
            super().write_kv(k, v, k_cache_, v_cache_, slot_mapping.long())
            return
        num_slots = k_cache_.shape[0] * k_cache_.shape[1]
        for rows, cache_ in ((k, k_cache_), (v, v_cache_)):
            addresses = rows.data_ptr(), rows.stride(0), slot_mapping.data_ptr(), cache_.data_ptr()
            kernels.write_rows(*addresses, num_rows, num_heads * head_dim, num_slots)

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
        if 0 < meta.num_pairs <= self._max_compiled_pairs and _fits_kernel(q, k_cache, v_cache, meta, window):
            return attend(q.contiguous(), k_cache, v_cache, meta, scale, causal, window)
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
            sum(map(mul, batch.query_lens_cpu, batch.seq_lens_cpu)),
        )

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> LinearFn:
        """See `Backend.pack_linear`; for inference only.

        What the compiled kernel does not take goes to oneDNN's blocked layout if it is fp32.
        """
        linear = compiled_linear(weight.detach(), bias)
        if linear is not None:
            return linear
        if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return lambda x: F.linear(x, weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach(), PACKED_ROWS)
        pointwise = torch.ops.mkldnn._linear_pointwise.default

        def packed_linear(x: Tensor) -> Tensor:
            out: Tensor = pointwise(x, packed, bias, "none", [], "")
            return out

        return packed_linear

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


def _fits_kernel(q: Tensor, k_cache: Tensor, v_cache: Tensor, meta: CpuAttentionMetadata, window: int | None) -> bool:
    """Return whether the compiled attention takes these tensors."""
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and _is_inference(q, k_cache, v_cache)):
        return False
    has_shapes = k_cache.shape == v_cache.shape and q.shape[2] == k_cache.shape[3]
    has_tables = meta.max_seq_len <= meta.block_tables.shape[1] * k_cache.shape[1]
    return meta.has_plain_lengths and has_shapes and has_tables and (window is None or window > 0)
