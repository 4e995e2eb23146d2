# SPDX-License-Identifier: Apache-2.0
"""Building blocks of targets and drafters: linears (plain and merged), norms, embedding, MLP, paged attention.

Constructors allocate uninitialised weights on the backend's device, so that loading fills them without a second copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash.ops.backend import Backend, LinearFn
from adaflash.ops.metadata import AttentionMetadata, NormOutput


def _parameter(shape: tuple[int, ...], backend: Backend, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=backend.device))


class Linear(nn.Module):
    """x -> x @ weight.T + bias; after `pack`, the backend's own form of it.

    Args:
        in_features: Input features.
        out_features: Output features.
        bias: Whether there is a bias.
        backend: Where the weights live.
        dtype: Of the weights.
        tied_weight: Another module's weight [out_features, in_features] to share, instead of an own one.

    Attributes:
        weight: [out_features, in_features]; gone after `pack`.
        bias: [out_features] or None; gone after `pack`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        backend: Backend,
        dtype: torch.dtype,
        tied_weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        shape = (out_features, in_features)
        self.weight = _parameter(shape, backend, dtype) if tied_weight is None else tied_weight
        self.bias = _parameter((out_features,), backend, dtype) if bias else None
        self._packed: LinearFn | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, [..., in_features] -> [..., out_features]."""
        return F.linear(x, self.weight, self.bias) if self._packed is None else self._packed(x)

    def pack(self, backend: Backend) -> None:
        """Hand the weights to the backend and drop them; the layer can no longer be trained or read."""
        assert self._packed is None, "a linear layer is packed once"
        self._packed = backend.pack_linear(self.weight.detach(), None if self.bias is None else self.bias.detach())
        del self.weight, self.bias


class MergedLinear(Linear):
    """Several linears of the same input as one matmul; the checkpoint holds them under their own names.

    Args:
        in_features: Input features of all parts.
        parts: Output features of each part by its checkpoint name, in the order of the output.
        bias: Whether each part has a bias.
        backend: Where the weights live.
        dtype: Of the weights.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], bias: bool, backend: Backend, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias, backend, dtype)
        self.parts = dict(parts)


class RMSNorm(nn.Module):
    """`Backend.rms_norm` with a weight [size]."""

    def __init__(self, size: int, eps: float, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter((size,), backend, dtype)
        self.eps = eps
        self.backend = backend

    def forward(self, x: Tensor, residual: Tensor | None = None) -> NormOutput:
        """Return the norm of x + residual, and x + residual, each [..., size]."""
        return self.backend.rms_norm(x, self.weight, self.eps, residual)


class Embedding(nn.Module):
    """Rows of a table [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter((vocab_size, hidden_size), backend, dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return [..., hidden_size] for ids [...]."""
        return F.embedding(token_ids, self.weight)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one matmul."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, backend: Backend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias, backend, dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, backend, dtype)
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP, [T, hidden_size] -> [T, hidden_size]."""
        hidden: Tensor = self.down_proj(self.backend.silu_and_mul(self.gate_up_proj(x)))
        return hidden


class AttentionInputs(NamedTuple):
    """What attention layers share in one step: cos/sin [T, rotary_dim / 2] fp32, slot_mapping [T], lengths."""

    cos: Tensor
    sin: Tensor
    slot_mapping: Tensor
    meta: AttentionMetadata


class Attention(nn.Module):
    """Causal grouped-query attention over the paged cache, q/k/v in one matmul.

    Args:
        hidden_size: Model width.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of num_heads.
        head_dim: Features per head.
        bias: Whether all four projections have a bias.
        qk_norm_eps: Epsilon of the per-head norm of q and k before rope; None for no norm.
        window: Keys visible up to and including the own position; None for all.
        backend: Where the ops run.
        dtype: Of the weights.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        qk_norm_eps: float | None,
        window: int | None,
        backend: Backend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        parts = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
        self.qkv_proj = MergedLinear(hidden_size, parts, bias, backend, dtype)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias, backend, dtype)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps, backend, dtype)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps, backend, dtype)
        self.head_dim = head_dim
        self.window = window
        self.backend = backend

    def forward(self, x: Tensor, inputs: AttentionInputs, k_cache_: Tensor, v_cache_: Tensor) -> Tensor:
        """Write this step's keys and values, then attend, [T, hidden_size] -> [T, hidden_size]."""
        parts = self.qkv_proj(x).split(list(self.qkv_proj.parts.values()), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)  # [T, Hq, D], 2 x [T, Hkv, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).normed, self.k_norm(k).normed
        q, k = self.backend.apply_rope(q, k, inputs.cos, inputs.sin)
        self.backend.write_kv(k, v, k_cache_, v_cache_, inputs.slot_mapping)
        attended = self.backend.paged_attention(
            q, k_cache_, v_cache_, inputs.meta, self.head_dim**-0.5, causal=True, window=self.window
        )  # [T, Hq, D]
        hidden: Tensor = self.o_proj(attended.flatten(1))
        return hidden


def checkpoint_slots(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter under its checkpoint name, merged linears split into views of their parts.

    Writing into a view fills the parameter. A parameter used twice (tied) appears once, under its first name.
    """
    slots: dict[str, Tensor] = {}
    seen: set[int] = set()
    for module_name, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(child, MergedLinear):
                prefix = module_name.rpartition(".")[0]
                views = parameter.detach().split(list(child.parts.values()))
                slots |= {f"{prefix}.{part}.{name}".lstrip("."): v for part, v in zip(child.parts, views, strict=True)}
            else:
                slots[f"{module_name}.{name}".lstrip(".")] = parameter.detach()
    return slots
