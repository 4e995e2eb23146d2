# SPDX-License-Identifier: Apache-2.0
"""Both spellings of rope, eos ids of both files, and errors that name the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from adaflash.errors import CheckpointError
from adaflash.models.base import ModelConfig
from adaflash.models.loader import read_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}


def parse(directory: Path, config: dict[str, object], generation: dict[str, object] | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(directory)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config = parse(tmp_path, LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps) == (8, 4, 1e-6)
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_dim) == ("default", 10_000.0, 8)
    flags = (config.tie_word_embeddings, config.attention_bias, config.mlp_bias, config.qk_norm)
    assert not any(flags)
    assert (config.eos_token_ids, config.dtype) == ((), torch.float32)


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 2], {"eos_token_id": 2}, (5, 2)),
        (None, {"eos_token_id": [7, 0]}, (7, 0)),
        (2, {"eos_token_id": [2, 9]}, (2, 9)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_eos_ids_come_from_both_files(
    tmp_path: Path, eos: object, generation: dict[str, object] | None, expected: tuple[int, ...]
) -> None:
    assert parse(tmp_path, LLAMA | {"eos_token_id": eos}, generation).eos_token_ids == expected


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_is_read_under_either_name(tmp_path: Path, key: str) -> None:
    assert parse(tmp_path, LLAMA | {key: "bfloat16"}).dtype == torch.bfloat16


def test_old_and_new_rope_spellings_agree(tmp_path: Path) -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128}}
    new = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 5e5}
    parsed = [
        parse(tmp_path, QWEN3 | spelling).rope
        for spelling in (old, {"rope_parameters": new}, {"rope_parameters": {"full_attention": new}})
    ]
    assert parsed[0] == parsed[1] == parsed[2]
    assert parsed[0].theta == 5e5
    assert parsed[0].scaling == {"factor": 4.0, "original_max_position_embeddings": 128.0, "truncate": 1.0}


@pytest.mark.parametrize(
    ("rope", "max_positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
    ],
)
def test_scaled_rope_extends_the_positions(tmp_path: Path, rope: dict[str, object], max_positions: int) -> None:
    assert parse(tmp_path, LLAMA | {"rope_scaling": rope}).max_position_embeddings == max_positions


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": 8}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_qwen3_windows_need_use_sliding_window(
    tmp_path: Path, keys: dict[str, object], expected: tuple[int | None, ...]
) -> None:
    assert parse(tmp_path, QWEN3 | keys).layer_windows == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures is missing", "LlamaForCausalLM"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq", "bfloat16"]),
        ({"hidden_size": None}, ["hidden_size is missing", "integer >= 1"]),
        ({"vocab_size": "97"}, ["vocab_size='97'", "integer >= 1"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "integer >= 1"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "divisor of num_attention_heads=4"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype='float8_e4m3fn'", "bfloat16"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id='</s>'", "integer"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_scaling.rope_type='longrope'", "llama3", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor is missing", "number > 0"]),
        ({"rope_scaling": [1]}, ["rope_scaling=[1]", "an object"]),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            ["rope_scaling.high_freq_factor=4", "above low_freq_factor=4"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
            ["rope_parameters", "same for all layer types"],
        ),
        ({"partial_rotary_factor": 0.4}, ["partial_rotary_factor=0.4", "even number"]),
    ],
)
def test_a_bad_key_is_named_with_its_value_and_what_is_allowed(
    tmp_path: Path, change: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(tmp_path, LLAMA | change)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(caught.value)


def test_unknown_layer_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types=.*linear_attention.*sliding_attention"):
        parse(tmp_path, QWEN3 | {"layer_types": ["linear_attention"] * 4})


@pytest.mark.parametrize(("content", "words"), [("{", "cannot be read as JSON"), ("[]", "must be an object")])
def test_a_broken_config_file_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{words}"):
        read_model_config(tmp_path)


def test_missing_directory_and_missing_config_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a directory"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_model_config(tmp_path)
