# SPDX-License-Identifier: Apache-2.0
"""Parsing `config.json` and `generation_config.json` into `ModelConfig`: the keys all dense families share."""

from __future__ import annotations

import torch

from adaflash.models.base import ModelConfig, RopeConfig
from adaflash.models.json_config import JsonConfig
from adaflash.models.rope import ROPE_KINDS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_YARN_OPTIONAL_KEYS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def parse_dense_config(
    raw: JsonConfig,
    generation: JsonConfig | None,
    architecture: str,
    head_dim: int,
    mlp_bias: bool,
    qk_norm: bool,
    layer_windows: tuple[int | None, ...],
) -> ModelConfig:
    """Return the config of a dense decoder from what all families spell alike and what the family decided.

    Args:
        raw: `config.json`.
        generation: `generation_config.json`, None if there is none.
        architecture: Name of the family's class.
        head_dim: Features per head.
        mlp_bias: Whether the MLP's linears have biases.
        qk_norm: Whether q and k are normed per head.
        layer_windows: Sliding window of each layer.

    Raises:
        CheckpointError: A key is missing or invalid.
    """
    num_heads = raw.integer("num_attention_heads")
    num_kv_heads = raw.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise raw.error("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    if raw.text("hidden_act", "silu") not in ("silu", "swish"):
        raise raw.error("hidden_act", "silu")
    rope = parse_rope(raw, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=raw.integer("hidden_size"),
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=_max_positions(raw.integer("max_position_embeddings"), rope),
        tie_word_embeddings=raw.boolean("tie_word_embeddings", False),
        attention_bias=raw.boolean("attention_bias", False),
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        layer_windows=layer_windows,
        eos_token_ids=parse_eos_token_ids(raw, generation),
        dtype=parse_dtype(raw),
    )


def parse_dtype(raw: JsonConfig) -> torch.dtype:
    """Return the checkpoint's dtype; float32, as in transformers, when the file names none."""
    key = "dtype" if "dtype" in raw else "torch_dtype"
    dtype = _DTYPES.get(raw.text(key, "float32").removeprefix("torch."))
    if dtype is None:
        raise raw.error(key, "one of " + ", ".join(_DTYPES))
    return dtype


def parse_eos_token_ids(raw: JsonConfig, generation: JsonConfig | None) -> tuple[int, ...]:
    """Return the ids that end a generation: those of `config.json`, then further ones of `generation_config.json`."""
    ids = raw.integers("eos_token_id")
    if generation is not None:
        ids += generation.integers("eos_token_id")
    return tuple(dict.fromkeys(ids))


def parse_rope(raw: JsonConfig, head_dim: int) -> RopeConfig:
    """Return the rope of a config that has `rope_theta` + `rope_scaling`, or `rope_parameters`, nested or not.

    Raises:
        CheckpointError: A key is invalid, the kind is unknown, or layer types have different ropes.
    """
    section = raw.section("rope_scaling") or raw.section("rope_parameters") or JsonConfig(raw.path, {}, "rope_scaling")
    ropes = [_parse_one_rope(raw, one, head_dim) for one in section.sections() or [section]]
    if any(rope != ropes[0] for rope in ropes):
        raise raw.error("rope_parameters", "the same for all layer types")
    return ropes[0]


def _parse_one_rope(raw: JsonConfig, section: JsonConfig, head_dim: int) -> RopeConfig:
    key = "rope_type" if "rope_type" in section else "type"
    kind = section.text(key, "default")
    if kind not in ROPE_KINDS:
        raise section.error(key, "one of " + ", ".join(ROPE_KINDS))
    theta_source = section if "rope_theta" in section else raw
    partial_source = section if "partial_rotary_factor" in section else raw
    rotary_dim = int(head_dim * partial_source.number("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise partial_source.error("partial_rotary_factor", f"such that an even number of {head_dim} features rotate")
    scaling = _parse_scaling(raw, section, kind)
    return RopeConfig(theta_source.number("rope_theta", 10_000.0), rotary_dim, kind, scaling)


def _parse_scaling(raw: JsonConfig, section: JsonConfig, kind: str) -> dict[str, float]:
    if kind == "linear":
        return {"factor": section.number("factor")}
    if kind not in ("llama3", "yarn"):
        return {}
    max_positions = raw.integer("max_position_embeddings")
    key = "original_max_position_embeddings"
    original = float((raw if key in raw else section).integer(key, max_positions))
    if kind == "llama3":
        scaling = {name: section.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise section.error("high_freq_factor", f"above low_freq_factor={scaling['low_freq_factor']}")
        return scaling | {key: original}
    scaling = {name: section.number(name) for name in _YARN_OPTIONAL_KEYS if name in section}
    scaling["truncate"] = float(section.boolean("truncate", True))
    return scaling | {key: original, "factor": section.number("factor", max_positions / original)}


def _max_positions(configured: int, rope: RopeConfig) -> int:
    """Return the positions the scaled rope reaches; files often keep the length before scaling, as vLLM assumes too."""
    if rope.kind == "linear":
        return int(configured * rope.scaling["factor"])
    if rope.kind == "yarn":
        return max(configured, int(rope.scaling["original_max_position_embeddings"] * rope.scaling["factor"]))
    return configured
