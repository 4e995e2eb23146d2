# SPDX-License-Identifier: Apache-2.0
"""Reading a drafter's config.json: public spellings, defaults, and errors that name the culprit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from adaflash.errors import CheckpointError
from adaflash.speculative.drafter_config import (
    DrafterConfig,
    LayerAttention,
    default_tap_layer_ids,
    load_drafter_config,
    parse_drafter_config,
)

Raw = Mapping[str, object]
SLIDING: dict[str, object] = {"layer_types": ["full_attention"] + ["sliding_attention"] * 4, "sliding_window": 2048}


def raw_config(top: Raw | None = None, nested: Raw | None = None) -> dict[str, object]:
    """The published layout of a drafter for Qwen3-8B."""
    dflash_config: dict[str, object] = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]} | dict(
        nested or {}
    )
    config: dict[str, object] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 16,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960,
        "max_window_layers": 5,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 36,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return config | {"dflash_config": dflash_config} | dict(top or {})


def parse(top: Raw | None = None, nested: Raw | None = None, without: str = "") -> DrafterConfig:
    config = raw_config(top, nested)
    config.pop(without, None)
    nested_config = config["dflash_config"]
    assert isinstance(nested_config, dict)
    nested_config.pop(without, None)
    return parse_drafter_config(config, Path("config.json"))


def test_the_published_layout_is_read() -> None:
    config = parse()
    assert config.draft_block_size == 16
    assert config.mask_token_id == 151669
    assert config.tap_layer_ids == (1, 9, 17, 25, 33)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (4096, 12288, 151936)
    assert config.rope.theta == 1e6
    assert config.layer_attention == (LayerAttention(causal=False, window=None),) * 5
    assert config.draft_vocab_size is None
    assert config.length_head_dim is None
    assert config.dtype == torch.bfloat16


def test_the_length_head_is_read() -> None:
    head = {"use_thresh_head_two_model": True, "thresh_head_direct_len": True, "thresh_head_bottleneck_dim": 256}
    assert parse(nested=head).length_head_dim == 256
    assert parse(nested=head | {"use_thresh_head_two_model": False}).length_head_dim is None


def test_rope_parameters_and_a_nested_block_size_are_read() -> None:
    top = {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "block_size": None}
    config = parse(top, {"block_size": 8}, without="rope_theta")
    assert config.rope.theta == 1e7
    assert config.draft_block_size == 8


@pytest.mark.parametrize(
    ("num_layers", "num_target_layers", "taps"),
    [
        (1, 36, (18,)),
        (5, 36, (1, 9, 17, 25, 33)),
        (5, 28, (1, 7, 13, 19, 25)),
        (3, 30, (1, 14, 27)),
        (5, 32, (1, 8, 15, 22, 29)),
    ],
)
def test_taps_default_to_even_spacing(num_layers: int, num_target_layers: int, taps: tuple[int, ...]) -> None:
    assert default_tap_layer_ids(num_layers, num_target_layers) == taps


def test_taps_default_when_the_config_has_none() -> None:
    assert parse(without="target_layer_ids").tap_layer_ids == (1, 9, 17, 25, 33)


def test_shifted_tap_ids_are_shifted_back() -> None:
    config = parse({"eagle_aux_hidden_state_layer_ids": [3, 7]}, without="target_layer_ids")
    assert config.tap_layer_ids == (2, 6)


def test_sliding_layers_are_causal_and_full_ones_are_not() -> None:
    full, sliding = LayerAttention(causal=False, window=None), LayerAttention(causal=True, window=2048)
    assert parse(SLIDING).layer_attention == (full, *[sliding] * 4)


@pytest.mark.parametrize(
    ("top", "nested", "causal"),
    [
        ({}, {"causal": False}, False),
        ({}, {"causal": True}, True),
        ({"is_causal": True}, {"causal": False}, True),
        ({"is_causal": False}, {"causal": True}, False),
        ({"is_causal": False}, {}, False),
    ],
)
def test_an_explicit_causality_wins_over_the_layer_type(top: Raw, nested: Raw, causal: bool) -> None:
    attention = parse(SLIDING | dict(top), nested).layer_attention
    assert [layer.causal for layer in attention] == [causal] * 5
    assert [layer.window for layer in attention] == [None, 2048, 2048, 2048, 2048]


def test_layers_slide_from_max_window_layers_on_without_layer_types() -> None:
    top = {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 64}
    windows = [layer.window for layer in parse(top, without="layer_types").layer_attention]
    assert windows == [None, None, None, 64, 64]
    assert parse(without="layer_types").layer_attention == parse().layer_attention


@pytest.mark.parametrize(
    ("top", "nested", "culprits"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, {}, ["architectures", "DFlash2DraftModel", "DFlashDraftModel"]),
        ({"architectures": None}, {}, ["architectures"]),
        ({}, {"projector_type": "dspark"}, ["projector_type", "dspark"]),
        ({"projector_type": "domino"}, {}, ["projector_type", "domino"]),
        ({"dspark_markov_rank": 256}, {}, ["dspark_markov_rank", "256"]),
        ({}, {"conv_kernel_size": 2}, ["dflash_config.conv_kernel_size", "convolution"]),
        ({}, {"selector_rank": 256}, ["selector_rank", "selector"]),
        ({}, {"use_prob_head": True}, ["use_prob_head"]),
        ({}, {"use_thresh_head_subsequent": True}, ["use_thresh_head_subsequent"]),
        ({"attention_sink_bias": True}, {}, ["attention_sink_bias", "attention sinks"]),
        ({"final_logit_softcapping": 30.0}, {}, ["final_logit_softcapping"]),
        ({"speculators_model_type": "dflash-qwen3"}, {}, ["speculators_model_type", "speculators format"]),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, ["quantization_config", "quantised"]),
        ({}, {"sample_from_anchor": True}, ["sample_from_anchor"]),
        ({"is_neox_style": False}, {}, ["is_neox_style"]),
        ({"hidden_act": "gelu"}, {}, ["hidden_act", "gelu", "silu"]),
        ({}, {"brand_new_feature": 3}, ["brand_new_feature"]),
        ({"dflash_config": [1]}, {}, ["dflash_config"]),
        ({"block_size": 1}, {}, ["block_size=1", ">= 2"]),
        ({"block_size": "16"}, {}, ["block_size='16'"]),
        ({}, {"mask_token_id": None}, ["mask_token_id", "missing"]),
        ({}, {"target_layer_ids": [1, 36]}, ["target_layer_ids=[1, 36]", "[0, 36)"]),
        ({"num_key_value_heads": 5}, {}, ["num_key_value_heads=5", "32"]),
        ({"layer_types": ["full_attention"] * 4}, {}, ["layer_types", "num_hidden_layers=5"]),
        ({"layer_types": ["chunked_attention"] * 5}, {}, ["layer_types", "chunked_attention"]),
        ({"layer_types": ["sliding_attention"] * 5}, {}, ["sliding_window", "missing"]),
        ({}, {"use_thresh_head_two_model": True, "thresh_head_bottleneck_dim": 8}, ["thresh_head_direct_len"]),
        ({}, {"use_thresh_head_two_model": True, "thresh_head_direct_len": True}, ["thresh_head_bottleneck_dim"]),
    ],
)
def test_what_is_not_computed_is_an_error_naming_it(top: Raw, nested: Raw, culprits: list[str]) -> None:
    config = raw_config(top, None if "dflash_config" in top else nested)
    with pytest.raises(CheckpointError) as error:
        parse_drafter_config(config, Path("config.json"))
    for culprit in ["config.json", *culprits]:
        assert culprit in str(error.value)


def test_variants_that_are_switched_off_are_fine() -> None:
    top: Raw = {"attention_sink_bias": False, "dspark_markov_rank": None, "eagle_aux_hidden_state_layer_ids": [2, 10]}
    nested: Raw = {"sample_from_anchor": False, "use_swa": False, "projector_type": None}
    assert parse(top, nested) == parse()


@pytest.mark.parametrize(
    "field", ["num_target_layers", "hidden_size", "vocab_size", "rms_norm_eps", "num_hidden_layers"]
)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(CheckpointError, match=f"{field} is missing"):
        parse(without=field)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_drafter_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        load_drafter_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must be an object"):
        load_drafter_config(tmp_path)
