# SPDX-License-Identifier: Apache-2.0
"""The pre-norm decoder that dense targets share: layers over a deferred residual, taps, and the LM head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adaflash.cache.kv_cache import KVCache
from adaflash.models.base import ModelConfig, TargetModel, TargetOutput
from adaflash.models.layers import MLP, Attention, AttentionInputs, Embedding, Linear, RMSNorm
from adaflash.models.rope import RotaryEmbedding
from adaflash.ops.backend import Backend, LinearFn
from adaflash.ops.metadata import AttentionMetadata


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before; the second addition is left to the next norm."""

    def __init__(self, config: ModelConfig, window: int | None, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend, dtype)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_bias,
            config.rms_norm_eps if config.qk_norm else None,
            window,
            backend,
            dtype,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend, dtype)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, backend, dtype)

    def forward(
        self, delta: Tensor, residual: Tensor | None, inputs: AttentionInputs, k_cache_: Tensor, v_cache_: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (delta, residual), each [T, H]; the layer's output is their sum, as is its input (None is 0)."""
        normed, residual = self.input_layernorm(delta, residual)
        attended = self.self_attn(normed, inputs, k_cache_, v_cache_)
        normed, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(normed), residual


class Decoder(nn.Module):
    """Embedding, layers and final norm, under the checkpoint's prefix `model.`."""

    def __init__(self, config: ModelConfig, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, backend, dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, window, backend, dtype) for window in config.layer_windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend, dtype)

    def forward(
        self, token_ids: Tensor, inputs: AttentionInputs, kv_: KVCache, tap_layer_ids: tuple[int, ...]
    ) -> TargetOutput:
        """See `TargetModel.forward`."""
        delta: Tensor = self.embed_tokens(token_ids)  # [T, H]
        residual: Tensor | None = None
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            delta, residual = layer(delta, residual, inputs, kv_.k[i], kv_.v[i])
            if i in tap_layer_ids:
                tapped[i] = delta + residual
        hidden: Tensor = self.norm(delta, residual).normed
        taps = torch.cat([tapped[i] for i in tap_layer_ids], dim=-1) if tap_layer_ids else None
        return TargetOutput(hidden, taps)


class CausalDecoder(TargetModel, nn.Module):
    """A dense causal language model; families differ in their config only.

    Args:
        config: The architecture.
        backend: Where weights live and ops run.
        dtype: Of weights and computation.
    """

    def __init__(self, config: ModelConfig, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.dtype = dtype
        self.rotary = RotaryEmbedding(config.rope, backend.device)
        self.model = Decoder(config, backend, dtype)
        tied = self.model.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = Linear(config.hidden_size, config.vocab_size, False, backend, dtype, tied)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        meta: AttentionMetadata,
        kv_: KVCache,
        tap_layer_ids: tuple[int, ...] = (),
    ) -> TargetOutput:
        """See `TargetModel.forward`."""
        assert all(0 <= i < self.config.num_layers for i in tap_layer_ids), f"no such layers: {tap_layer_ids}"
        cos, sin = self.rotary.cos_sin(positions)
        output: TargetOutput = self.model(token_ids, AttentionInputs(cos, sin, slot_mapping, meta), kv_, tap_layer_ids)
        return output

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `TargetModel.embed`."""
        embedded: Tensor = self.model.embed_tokens(token_ids)
        return embedded

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `TargetModel.compute_logits`."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def reduced_head(self, token_ids: Tensor) -> LinearFn:
        """See `TargetModel.reduced_head`."""
        return self.backend.pack_linear(self.lm_head.weight.detach()[token_ids], None)

    def pack(self) -> None:
        """See `TargetModel.pack`; a tied head is packed from the embedding, which stays for look-ups."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(self.backend)
