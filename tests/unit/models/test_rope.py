# SPDX-License-Identifier: Apache-2.0
"""Frequencies of published configs equal transformers', and angles keep their precision far out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from adaflash.models.base import RopeConfig
from adaflash.models.config import parse_rope
from adaflash.models.json_config import JsonConfig
from adaflash.models.rope import RotaryEmbedding

LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN3_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
CASES = {
    "llama_3_1": LLAMA_3_1,
    "llama_3_2": LLAMA_3_1 | {"factor": 32.0},
    "qwen3_yarn": QWEN3_YARN,
    "yarn_no_truncate": QWEN3_YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_mscale": QWEN3_YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn_attention_factor": QWEN3_YARN | {"attention_factor": 1.2},
    "yarn_tiny_context": QWEN3_YARN | {"original_max_position_embeddings": 4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
}


@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES)
def test_frequencies_equal_transformers(parameters: dict[str, object]) -> None:
    kind = str(parameters["rope_type"])
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=dict(parameters)
    )
    expected, attention_scaling = ROPE_INIT_FUNCTIONS[kind](config)
    raw = JsonConfig(Path("config.json"), {"max_position_embeddings": 131072, "rope_parameters": parameters})
    rotary = RotaryEmbedding(parse_rope(raw, head_dim=128), "cpu")
    torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(attention_scaling, rel=1e-12)


def test_angles_stay_fp32_at_distant_positions() -> None:
    config = RopeConfig(theta=1e4, rotary_dim=8, kind="default", scaling={})
    position = 131071
    cos, sin = RotaryEmbedding(config, "cpu").cos_sin(torch.tensor([0, position]))
    exact = position * 1e4 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert (cos.dtype, cos.shape) == (torch.float32, (2, 4))
    torch.testing.assert_close(cos[1].double(), exact.cos(), atol=1e-2, rtol=0)
    torch.testing.assert_close(sin[1].double(), exact.sin(), atol=1e-2, rtol=0)
