# SPDX-License-Identifier: Apache-2.0
"""The target interface the engine runs: packed tokens in, hidden states and taps out. Weights live in subclasses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adaflash.cache.kv_cache import KVCache
from adaflash.ops.backend import Backend, LinearFn
from adaflash.ops.metadata import AttentionMetadata


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters as HF configs give them.

    Attributes:
        theta: Base of the frequencies.
        rotary_dim: Rotated features per head.
        kind: `default`, `linear`, `dynamic`, `llama3` or `yarn`.
        scaling: The other keys of `rope_scaling` / `rope_parameters`, numbers only.
    """

    theta: float
    rotary_dim: int
    kind: str
    scaling: dict[str, float]


@dataclass(frozen=True)
class ModelConfig:
    """A target's architecture, parsed from `config.json` and `generation_config.json`.

    Attributes:
        architecture: First entry of `architectures`, e.g. `Qwen3ForCausalLM`.
        layer_windows: Sliding window of each layer, None for full attention.
        qk_norm: Whether q and k are normed per head before rope.
        eos_token_ids: Every id that ends a generation, from both files.
        dtype: The checkpoint's dtype.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype


class TargetOutput(NamedTuple):
    """Result of a target forward.

    `hidden` [T, H] after the final norm; `taps` [T, len(tap_layer_ids) * H] outputs of the tapped layers (residual
    stream, before the final norm) side by side in the order asked for, or None when none were.
    """

    hidden: Tensor
    taps: Tensor | None


class TargetModel(ABC):
    """A causal language model over packed sequences and a paged KV cache.

    Attributes:
        config: The architecture.
        backend: Where the ops run.
        dtype: Computation dtype.
    """

    config: ModelConfig
    backend: Backend
    dtype: torch.dtype

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        meta: AttentionMetadata,
        kv_: KVCache,
        tap_layer_ids: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run the decoder over T packed tokens; writes their K/V, then attends causally.

        Args:
            token_ids: [T] int64.
            positions: [T] int64.
            slot_mapping: [T] int64, all distinct.
            meta: From `backend.attention_metadata`.
            kv_: The target's cache, written in place.
            tap_layer_ids: Layers i whose output is returned in `taps`.
        """

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """Return token embeddings, [...] -> [..., H]."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Apply the LM head, [R, H] -> [R, V]."""

    @abstractmethod
    def reduced_head(self, token_ids: Tensor) -> LinearFn:
        """Return the LM head restricted to `token_ids` [Vd], a function [R, H] -> [R, Vd]. Call before `pack`."""

    @abstractmethod
    def pack(self) -> None:
        """Replace linear weights by the backend's packed form, one at a time; called once after loading."""
