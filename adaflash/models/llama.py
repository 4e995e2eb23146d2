# SPDX-License-Identifier: Apache-2.0
"""Llama: grouped-query attention, SwiGLU, optional biases."""

from __future__ import annotations

from adaflash.models.base import ModelConfig
from adaflash.models.config import parse_dense_config
from adaflash.models.decoder import CausalDecoder
from adaflash.models.json_config import JsonConfig


class LlamaForCausalLM(CausalDecoder):
    """Llama 2, 3 and models of their architecture."""

    @staticmethod
    def parse_config(raw: JsonConfig, generation: JsonConfig | None) -> ModelConfig:
        """See `parse_dense_config`."""
        default_head_dim = raw.integer("hidden_size") // raw.integer("num_attention_heads")
        return parse_dense_config(
            raw,
            generation,
            architecture=LlamaForCausalLM.__name__,
            head_dim=raw.integer("head_dim", default_head_dim),
            mlp_bias=raw.boolean("mlp_bias", False),
            qk_norm=False,
            layer_windows=(None,) * raw.integer("num_hidden_layers"),
        )
