# SPDX-License-Identifier: Apache-2.0
"""Qwen3 (dense): Llama with per-head norms of q and k, and sliding windows on some layers."""

from __future__ import annotations

from adaflash.models.base import ModelConfig
from adaflash.models.config import parse_dense_config
from adaflash.models.decoder import CausalDecoder
from adaflash.models.json_config import JsonConfig

_LAYER_TYPES = ("full_attention", "sliding_attention")


class Qwen3ForCausalLM(CausalDecoder):
    """Qwen3 dense models."""

    @staticmethod
    def parse_config(raw: JsonConfig, generation: JsonConfig | None) -> ModelConfig:
        """See `parse_dense_config`."""
        return parse_dense_config(
            raw,
            generation,
            architecture=Qwen3ForCausalLM.__name__,
            head_dim=raw.integer("head_dim", 128),
            mlp_bias=False,
            qk_norm=True,
            layer_windows=parse_layer_windows(raw),
        )


def parse_layer_windows(raw: JsonConfig) -> tuple[int | None, ...]:
    """Return each layer's sliding window, from `layer_types`, or else from `max_window_layers`."""
    num_layers = raw.integer("num_hidden_layers")
    window = raw.integer("sliding_window", 4096) if raw.boolean("use_sliding_window", False) else None
    layer_types = raw.texts("layer_types")
    if not layer_types:
        first = raw.integer("max_window_layers", 28, minimum=0)
        return tuple(window if i >= first else None for i in range(num_layers))
    if len(layer_types) != num_layers or not set(layer_types) <= set(_LAYER_TYPES):
        raise raw.error("layer_types", f"num_hidden_layers={num_layers} entries, each {' or '.join(_LAYER_TYPES)}")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
