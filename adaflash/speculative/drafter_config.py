# SPDX-License-Identifier: Apache-2.0
"""A DFlash drafter's architecture as its `config.json` states it; variants this package does not compute are errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from adaflash.errors import CheckpointError
from adaflash.models.base import RopeConfig
from adaflash.models.config import parse_dtype, parse_rope
from adaflash.models.json_config import JsonConfig

ARCHITECTURE = "DFlashDraftModel"
NESTED = "dflash_config"
NESTED_KEYS = frozenset(
    {
        "block_size",
        "causal",
        "is_causal",
        "mask_token",
        "mask_token_id",
        "num_target_layers",
        "target_layer_ids",
        "thresh_head_bottleneck_dim",
        "thresh_head_direct_len",
        "use_aux_hidden_state",
        "use_thresh_head_two_model",
    }
)
# Part of a key -> the variant it belongs to. A key set to null, false, 0 or "" switches the variant off.
VARIANTS = (
    ("projector_type", "a projector head (DSpark, Domino)"),
    ("markov", "the DSpark Markov head"),
    ("dspark", "DSpark"),
    ("domino", "Domino"),
    ("dflare", "DFlare"),
    ("conv_", "the DFlash2 dynamic convolution"),
    ("selector", "the DFlash2 candidate selector"),
    ("prob_head", "the per-position acceptance head"),
    ("thresh_head_subsequent", "the subsequent length head"),
    ("confidence_head", "the DSpark confidence head"),
    ("sink", "attention sinks"),
    ("value_scale", "scaled attention values"),
    ("softcap", "logit soft-capping"),
    ("embedding_scale", "scaled embeddings"),
    ("use_swa", "MiMo's sliding-window layout"),
    ("shift_label", "shifted labels"),
    ("sample_from_anchor", "drafts sampled from the anchor's own row"),
    ("query_causal", "causal drafter queries"),
    ("speculators", "the speculators format"),
    ("quantization_config", "a quantised drafter"),
    ("compression_config", "a quantised drafter"),
    ("mlp_bias", "biases in the MLP"),
)


@dataclass(frozen=True)
class LayerAttention:
    """How the draft block attends in one layer.

    Attributes:
        causal: Whether a block row is blind to later rows; the context is visible either way.
        window: Keys visible up to and including the own position; None for all.
    """

    causal: bool
    window: int | None


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter's architecture.

    Attributes:
        draft_block_size: W, anchor included.
        mask_token_id: Filler of the block's rows 1..W-1, an id of the target's vocabulary.
        tap_layer_ids: Target layers i whose output feeds the context.
        num_target_layers: Layers of the target it was trained for.
        draft_vocab_size: Columns of the reduced LM head; None when it is the target's.
        attention_bias: Whether q, k, v and o projections have biases.
        layer_attention: One entry per draft layer.
        length_head_dim: Bottleneck width of the threshold length head; None without one.
        dtype: The checkpoint's dtype.
    """

    draft_block_size: int
    mask_token_id: int
    tap_layer_ids: tuple[int, ...]
    num_target_layers: int
    vocab_size: int
    draft_vocab_size: int | None
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    attention_bias: bool
    layer_attention: tuple[LayerAttention, ...]
    length_head_dim: int | None
    dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        """Number of draft layers."""
        return len(self.layer_attention)


def load_drafter_config(directory: Path) -> DrafterConfig:
    """Read `config.json` of a drafter.

    Raises:
        CheckpointError: The file is missing or malformed, or asks for something this drafter does not compute.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a JSON {type(raw).__name__}: must be an object")
    return parse_drafter_config(raw, path)


def parse_drafter_config(raw: Mapping[str, object], path: Path) -> DrafterConfig:
    """Build a `DrafterConfig` from a parsed `config.json`; a key of `dflash_config` wins over the same top-level key.

    Args:
        raw: The JSON object.
        path: The file, for messages.

    Raises:
        CheckpointError: A field is missing or wrong, or a variant is not supported; names field, value and expected.
    """
    nested = raw.get(NESTED) or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: {NESTED}={nested!r} is invalid: must be an object")
    _reject_variants(raw, nested, path)
    fields = JsonConfig(path, {**raw, **{key: value for key, value in nested.items() if value is not None}})
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    num_target_layers = fields.integer("num_target_layers")
    layer_attention = _layer_attention(fields)
    return DrafterConfig(
        draft_block_size=fields.integer("block_size", minimum=2),
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        tap_layer_ids=_tap_layer_ids(fields, len(layer_attention), num_target_layers),
        num_target_layers=num_target_layers,
        vocab_size=fields.integer("vocab_size"),
        draft_vocab_size=fields.integer("draft_vocab_size") if "draft_vocab_size" in fields else None,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=parse_rope(fields, head_dim),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        attention_bias=fields.boolean("attention_bias", False),
        layer_attention=layer_attention,
        length_head_dim=_length_head_dim(fields),
        dtype=parse_dtype(fields),
    )


def default_tap_layer_ids(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Return the taps of a config that names none: the middle layer, or even spacing over 1 .. L_target - 3."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    last = num_target_layers - 3
    return tuple(round(1 + index * (last - 1) / (num_layers - 1)) for index in range(num_layers))


def _reject_variants(top: Mapping[str, object], nested: Mapping[str, object], path: Path) -> None:
    """Raise for every architecture, head or layout that would otherwise be ignored."""
    if top.get("architectures") != [ARCHITECTURE]:
        found = top.get("architectures")
        raise CheckpointError(f"{path}: architectures={found!r} is not supported: must be [{ARCHITECTURE!r}]")
    for scope, keys in (("", top), (f"{NESTED}.", nested)):
        for key, value in keys.items():
            for part, variant in VARIANTS:
                if value and part in key and value != "dflash":
                    raise CheckpointError(f"{path}: {scope}{key}={value!r} is not supported: {variant}")
    unknown = sorted(key for key, value in nested.items() if value and key not in NESTED_KEYS)
    if unknown:
        raise CheckpointError(f"{path}: {NESTED} has unknown keys {', '.join(unknown)}: they are not supported")
    for key, supported in (("is_neox_style", True), ("hidden_act", "silu")):
        if top.get(key, supported) not in (supported, None):
            raise CheckpointError(f"{path}: {key}={top[key]!r} is not supported: must be {supported!r}")


def _tap_layer_ids(fields: JsonConfig, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    taps = fields.integers("target_layer_ids")
    if not taps:
        # This key counts hidden states, where 0 is the embedding, not layers.
        taps = tuple(index - 1 for index in fields.integers("eagle_aux_hidden_state_layer_ids"))
    taps = taps or default_tap_layer_ids(num_layers, num_target_layers)
    if not all(0 <= tap < num_target_layers for tap in taps):
        raise CheckpointError(
            f"{fields.path}: target_layer_ids={list(taps)} is invalid: must be in [0, {num_target_layers}), "
            f"the layers of the target (num_target_layers)"
        )
    return taps


def _layer_attention(fields: JsonConfig) -> tuple[LayerAttention, ...]:
    """Sliding layers are causal unless overridden: `is_causal`, then `causal`, then the layer type."""
    override = next((fields.boolean(key, False) for key in ("is_causal", "causal") if key in fields), None)
    return tuple(
        LayerAttention(window is not None if override is None else override, window)
        for window in _layer_windows(fields, fields.integer("num_hidden_layers"))
    )


def _layer_windows(fields: JsonConfig, num_layers: int) -> list[int | None]:
    kinds = list(fields.texts("layer_types"))
    if not kinds:
        num_full = num_layers
        if fields.boolean("use_sliding_window", False):
            num_full = min(fields.integer("max_window_layers", 0, minimum=0), num_layers)
        kinds = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    if len(kinds) != num_layers or not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"num_hidden_layers={num_layers} of full_attention or sliding_attention")
    return [fields.integer("sliding_window") if kind == "sliding_attention" else None for kind in kinds]


def _length_head_dim(fields: JsonConfig) -> int | None:
    if not fields.boolean("use_thresh_head_two_model", False):
        return None
    if not fields.boolean("thresh_head_direct_len", False):
        raise fields.error("thresh_head_direct_len", "true: only the head that predicts a length is supported")
    return fields.integer("thresh_head_bottleneck_dim")
