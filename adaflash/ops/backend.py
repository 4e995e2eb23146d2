# SPDX-License-Identifier: Apache-2.0
"""The device interface: a concrete class whose method bodies are the reference implementation in plain PyTorch.

A device backend subclasses `Backend`, overrides what it accelerates, and returns `super().op(...)` for shapes its
kernel cannot take. Ops are functional; arguments written in place end in `_`. Letters as in `ops.metadata`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.errors import BackendError
from adaflash.ops import reference, reference_sampling
from adaflash.ops.graph_shapes import GraphBuckets
from adaflash.ops.host_batch import StaticBatch
from adaflash.ops.metadata import (
    AttentionMetadata,
    NormOutput,
    PackedBatch,
    SamplingMetadata,
    VerifyMetadata,
    VerifyOutput,
)

logger = logging.getLogger(__name__)

LinearFn = Callable[[Tensor], Tensor]
Output = TypeVar("Output")

OPS = (
    "rms_norm",
    "apply_rope",
    "silu_and_mul",
    "write_kv",
    "paged_attention",
    "verify_drafts",
    "copy_blocks",
    "sample",
)


class MemoryInfo(NamedTuple):
    """Device memory in bytes."""

    free_bytes: int
    total_bytes: int


class Fallback(NamedTuple):
    """Why calls of an op ran its reference body: what the kernel takes, in words that do not vary with the call."""

    op: str
    limit: str


class Backend:
    """Reference backend: correct on any torch device, differentiable, and what every other one is tested against.

    Attributes:
        device: Where tensors live.
        strict_ops: Whether a call that a kernel cannot take is an error.
        fallbacks: Number of such calls by reason.
    """

    name = "reference"
    preferred_block_size = 16
    # Rows of a forward cost as much as the next multiple of this: verifying up to there is free.
    row_multiple = 1
    # Whether `pack_linear` keeps a form of its own; then weights cannot change in place.
    packs_linears = False
    # Widest block [anchor, drafts ...] a sequence may draft and verify; None for any.
    max_draft_block_size: int | None = None
    # Whether plain PyTorch is the device's own implementation, so that a reference body is no fallback.
    reference_is_native = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.strict_ops = False
        self.fallbacks: Counter[Fallback] = Counter()

    # ---- ops -------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> NormOutput:
        """Return `h / sqrt(mean(h^2) + eps) * weight` with h = x + residual, and h itself.

        Args:
            x: [..., N]; normed over the last dimension, statistics in fp32.
            weight: [N].
            eps: Added to the mean square.
            residual: Same shape as x, or None for 0.
        """
        return reference.rms_norm(x, weight, eps, residual)

    def apply_rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate the first `rotary_dim` features of q and k, half-rotation (NeoX) layout.

        Args:
            q: [T, Hq, D].
            k: [T, Hkv, D].
            cos: [T, rotary_dim / 2] fp32.
            sin: [T, rotary_dim / 2] fp32.
        """
        return reference.rotate_half(q, cos, sin), reference.rotate_half(k, cos, sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up for gate_up = [gate | up], [T, 2I] -> [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def write_kv(self, k: Tensor, v: Tensor, k_cache_: Tensor, v_cache_: Tensor, slot_mapping: Tensor) -> None:
        """Write keys and values into their slots.

        Args:
            k: [T, Hkv, D].
            v: [T, Hkv, D].
            k_cache_: Shape `kv_cache_shape`, written in place.
            v_cache_: Shape `kv_cache_shape`, written in place.
            slot_mapping: [T] int64 slots of the cache, all distinct; devices need not check it.
        """
        reference.write_kv(k, v, k_cache_, v_cache_, slot_mapping)

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
        """Attend each sequence's packed queries to its own paged keys; one op for prefill, verify and draft block.

        Query i of a sequence with query length n and KV length s sits at position s - n + i (right-aligned). Causal:
        it sees keys at positions <= its own; otherwise all s keys. `window` hides keys at positions <= own - window.

        Args:
            q: [T, Hq, D].
            k_cache: Shape `kv_cache_shape`.
            v_cache: Shape `kv_cache_shape`.
            meta: Lengths and block tables of the batch.
            scale: Multiplies q . k.
            causal: Whether later keys are hidden.
            window: Number of keys visible up to and including the own position; None for all.

        Returns:
            [T, Hq, D]; rows of no sequence (padding) are undefined.
        """
        return reference.paged_attention(q, k_cache, v_cache, meta, scale, causal, window)

    def verify_drafts(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None,
        meta: VerifyMetadata,
        sampling: SamplingMetadata,
        draft_column_token_ids: Tensor | None = None,
    ) -> VerifyOutput:
        """Decide every sequence's tokens from the target's logits, and how many of its drafts they confirm.

        With `draft_logits` None (coupling `gumbel`, and all greedy rows) the token of a row is
        argmax(log p + Gumbel noise of its output index), and a draft is accepted when it equals that token: the
        result does not depend on the drafter. With `draft_logits` (coupling `rejection`) a sampled draft x ~ q is
        accepted with probability min(1, p(x) / q(x)), else replaced from the residual max(p - q, 0).

        Losslessness under `rejection`: whether position k is verified may depend on q at k and on drafts before k,
        never on the draft at k or later, nor on a target outcome.

        Args:
            target_logits: [R, V], raw.
            draft_token_ids: [S, K'] int64 target-vocabulary ids, K' >= max drafts; entries beyond a sequence's c_s
                are ignored.
            draft_logits: [S, K', Vd] logits q was made of, or None.
            meta: Rows of each sequence.
            sampling: [R] rows; filters and penalties are applied inside, in fp32.
            draft_column_token_ids: [Vd] target id of each draft column; None when Vd = V.
        """
        return reference_sampling.verify_drafts(
            target_logits, draft_token_ids, draft_logits, meta, sampling, draft_column_token_ids, self.sample
        )

    def copy_blocks(self, k_cache_: Tensor, v_cache_: Tensor, pairs: list[tuple[int, int]]) -> None:
        """Copy whole KV blocks, `(source, destination)` each: copy-on-write of shared blocks."""
        reference.copy_blocks(k_cache_, v_cache_, pairs)

    def sample(self, logits: Tensor, sampling: SamplingMetadata) -> Tensor:
        """Return one column index per row, [R, V] -> [R] int64, as `SamplingMetadata` describes."""
        return reference_sampling.sample(logits, sampling)

    # ---- runtime ---------------------------------------------------------------------------------------------

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of one layer's key (or value) cache; the layout belongs to the backend."""
        return (num_blocks, block_size, num_kv_heads, head_dim)

    def attention_metadata(self, batch: PackedBatch) -> AttentionMetadata:
        """Prepare what `paged_attention` needs, once per step for all layers."""
        return AttentionMetadata(
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.block_tables,
            batch.query_lens_cpu,
            batch.seq_lens_cpu,
            batch.block_tables_cpu,
        )

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> LinearFn:
        """Return a function x [T, in] -> [T, out] for weight [out, in]; the backend may keep its own layout.

        The caller drops its reference to `weight`, so a packed copy replaces it.
        """
        return lambda x: F.linear(x, weight, bias)

    def graph_buckets(self, max_num_seqs: int, max_num_tokens: int) -> GraphBuckets | None:
        """Return the shapes in which forwards of at most so many sequences and tokens are captured.

        None: launching kernels one by one costs this device nothing, forwards are not captured.
        """
        return None

    def capture(self, forward: Callable[[PackedBatch], Output], static: StaticBatch) -> Callable[[], Output]:
        """Capture a forward over `static`, and return what runs it again over the values `static` has by then.

        The reference calls `forward` again: the same static tensors, no gain. What a real graph returns is overwritten
        by its next run.

        Args:
            forward: Without effects on the host, and without reading from the device.
            static: Tensors at fixed addresses; lengths on the host change with `load`.
        """
        return lambda: forward(static.batch)

    def memory_info(self) -> MemoryInfo:
        """Return free and total memory of the device."""
        raise NotImplementedError(f"backend {self.name} does not report memory")

    def default_kv_cache_bytes(self, utilization: float) -> int:
        """Return the bytes the KV pool may take when nothing explicit is configured.

        Args:
            utilization: Share of the device's memory the engine may use, in (0, 1].
        """
        memory = self.memory_info()
        used = memory.total_bytes - memory.free_bytes
        return max(0, int(memory.total_bytes * utilization) - used)

    def preferred_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype `--dtype auto` computes in."""
        return checkpoint_dtype

    def native_ops(self) -> dict[str, bool]:
        """Return, for each op, whether this class overrides the reference body."""
        return {op: getattr(type(self), op) is not getattr(Backend, op) for op in OPS}

    def report_fallback(self, op: str, limit: str, found: str) -> None:
        """Count a call of `op` that runs the reference body because its kernel cannot take the arguments.

        Args:
            op: One of `OPS`.
            limit: What the kernel takes, e.g. `head_dim 128 or 192`; calls are counted by it.
            found: What it was given, e.g. `head_dim=64`.

        Raises:
            BackendError: `strict_ops` is set.
        """
        if self.strict_ops:
            raise BackendError(f"strict_ops: backend {self.name} runs {op} natively for {limit} only, found {found}")
        reason = Fallback(op, limit)
        if reason not in self.fallbacks:
            logger.warning(
                "op falls back to its reference backend=%s op=%s takes=%s found=%s", self.name, *reason, found
            )
        self.fallbacks[reason] += 1
