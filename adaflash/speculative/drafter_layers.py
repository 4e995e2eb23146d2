# SPDX-License-Identifier: Apache-2.0
"""Layers of the DFlash drafter with explicit keys and values: how they are attended is the caller's choice.

The engine attends through the paged cache, a trainer through dense tensors; both run the same layer bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash.models.layers import MLP, Linear, MergedLinear, RMSNorm
from adaflash.ops.backend import Backend, LinearFn
from adaflash.speculative.drafter_config import DrafterConfig, LayerAttention


class BlockInputs(NamedTuple):
    """Queries [T, Hq, D], keys and values [T, Hkv, D] of block rows, normed and rotated."""

    q: Tensor
    k: Tensor
    v: Tensor


class ContextKV(NamedTuple):
    """Keys and values of context rows, normed and rotated: one layer's [T, Hkv, D], or all layers' [T, L, Hkv, D]."""

    k: Tensor
    v: Tensor


class DrafterAttention(nn.Module):
    """Projections of one layer: q, k and v in one matmul, context rows through the k and v rows of the same weights."""

    def __init__(self, config: DrafterConfig, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        self.q_size, self.kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, config.attention_bias, backend, dtype)
        self.o_proj = Linear(self.q_size, config.hidden_size, config.attention_bias, backend, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, backend, dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, backend, dtype)
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.backend = backend

    def block_inputs(self, x: Tensor, cos: Tensor, sin: Tensor) -> BlockInputs:
        """Project normed block rows [T, H]."""
        parts = self.qkv_proj(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        q, k = self.backend.apply_rope(self.q_norm(q).normed, self.k_norm(k).normed, cos, sin)
        return BlockInputs(q, k, v)

    def context_weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows of the k and v projections, [2 * Hkv * D, H], and their bias."""
        bias = self.qkv_proj.bias
        return self.qkv_proj.weight[self.q_size :], None if bias is None else bias[self.q_size :]

    def context_kv(self, features: Tensor, cos: Tensor, sin: Tensor) -> ContextKV:
        """Project context features [T, H]; they do not pass `input_layernorm`."""
        weight, bias = self.context_weights()
        k, v = F.linear(features, weight, bias).view(len(features), 2, self.num_kv_heads, self.head_dim).unbind(1)
        return ContextKV(rotate_keys(self.backend, self.k_norm(k).normed, cos, sin), v)


class DrafterLayer(nn.Module):
    """One decoder layer: `block_inputs`, attention by the caller, `finish`.

    Attributes:
        attention: Causality and window of this layer.
    """

    def __init__(self, config: DrafterConfig, attention: LayerAttention, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config, backend, dtype)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, False, backend, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend, dtype)
        self.attention = attention

    def block_inputs(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> BlockInputs:
        """Return queries, keys and values of block rows [T, H] of the residual stream."""
        return self.self_attn.block_inputs(self.input_layernorm(hidden).normed, cos, sin)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add the attention output [T, Hq, D] and the MLP to the residual stream [T, H]."""
        normed, residual = self.post_attention_layernorm(self.self_attn.o_proj(attended.flatten(1)), hidden)
        out: Tensor = residual + self.mlp(normed)
        return out


def rotate_keys(backend: Backend, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rope to keys [T, heads, D] that have no queries; the op wants both, so one head goes through it twice."""
    return backend.apply_rope(keys, keys[:, :1], cos, sin)[0]


class FusedContext:
    """All layers' context projections as one matmul: a copy of their k/v weights, stale once those change.

    Rows are ordered [k of layer 0 .. L-1 | v of layer 0 .. L-1].
    """

    def __init__(self, layers: Sequence[DrafterAttention], backend: Backend) -> None:
        self.backend = backend
        self.num_layers, self.num_kv_heads, self.head_dim = len(layers), layers[0].num_kv_heads, layers[0].head_dim
        weight, bias, key_norm = _stack(layers)
        self.weight: Tensor | None = weight
        self.bias = bias
        self.key_norm = key_norm  # [L, 1, D]
        self.unit = torch.ones(self.head_dim, dtype=key_norm.dtype, device=key_norm.device)
        self.eps = layers[0].k_norm.eps
        self._packed: LinearFn | None = None

    def rebuild(self, layers: Sequence[DrafterAttention]) -> None:
        """Copy the weights again, in place: addresses captured by a graph stay."""
        assert self.weight is not None, "a packed projection cannot be rebuilt"
        weight, bias, key_norm = _stack(layers)
        self.weight.copy_(weight)
        self.key_norm.copy_(key_norm)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def weights(self) -> tuple[Tensor, ...]:
        """Return everything that rows depend on, not yet packed."""
        assert self.weight is not None, "a packed projection has no weights of its own"
        return self.weight, self.key_norm, *(() if self.bias is None else (self.bias,))

    def pack(self) -> None:
        """Hand the weights to the backend and drop them."""
        assert self.weight is not None, "a projection is packed once"
        self._packed = self.backend.pack_linear(self.weight, self.bias)
        self.weight = None

    def project(self, features: Tensor, cos: Tensor, sin: Tensor) -> ContextKV:
        """Return every layer's keys and values for context features [T, H], each [T, L, Hkv, D]."""
        if self._packed is not None:
            rows = self._packed(features)
        else:
            assert self.weight is not None, "an unpacked projection has its weight"
            rows = F.linear(features, self.weight, self.bias)
        k, v = rows.view(len(features), 2, self.num_layers, self.num_kv_heads, self.head_dim).unbind(
            1
        )  # 2 x [T, L, Hkv, D]
        normed = self.backend.rms_norm(k, self.unit, self.eps).normed * self.key_norm
        return ContextKV(rotate_keys(self.backend, normed.flatten(1, 2), cos, sin).view_as(k), v)


def _stack(layers: Sequence[DrafterAttention]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return weight [2 * L * Hkv * D, H], bias [2 * L * Hkv * D] or None, and key norm weights [L, 1, D]."""
    halves = [layer.context_weights()[0].detach().chunk(2) for layer in layers]
    weight = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    biases = [bias.detach().chunk(2) for layer in layers if (bias := layer.context_weights()[1]) is not None]
    bias = torch.cat([half[0] for half in biases] + [half[1] for half in biases]) if biases else None
    return weight, bias, torch.stack([layer.k_norm.weight.detach() for layer in layers])[:, None]
