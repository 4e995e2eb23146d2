# SPDX-License-Identifier: Apache-2.0
"""The built-in devices and models are complete, and their sizes are the published ones."""

from __future__ import annotations

import dataclasses
import json

import pytest

from adaflash.demo.drafter import demo_drafter_dir
from adaflash.errors import ConfigError
from adaflash.simulate.catalog import device_names, device_sources, load_device, load_model, model_names

KV_TOKEN_BYTES = {"Qwen3-8B": 147_456 + 20_480, "Qwen3-Coder-30B-A3B": 98_304 + 16_384}
PARAMETERS = {"Qwen3-8B": (8.191e9, 1.0486e9), "Qwen3-Coder-30B-A3B": (30.53e9, 0.474e9)}


@pytest.mark.parametrize("name", device_names())
def test_every_number_of_a_device_is_positive_and_has_a_source(name: str) -> None:
    device = load_device(name)
    numbers = {k: v for k, v in dataclasses.asdict(device).items() if k not in ("name", "description")}
    assert all(value > 0 for value in numbers.values())
    assert device_sources(name).keys() == numbers.keys()
    assert all(len(source) > 5 for source in device_sources(name).values())


@pytest.mark.parametrize("name", device_names())
def test_fractions_are_fractions(name: str) -> None:
    device = load_device(name)
    assert max(device.compute_fraction, device.bandwidth_fraction, device.attention_fraction) < 1


@pytest.mark.parametrize("name", KV_TOKEN_BYTES)
def test_weights_and_kv_have_the_published_sizes(name: str) -> None:
    model = load_model(name)
    assert model.num_values(0) == pytest.approx(sum(PARAMETERS[name]), rel=2e-3)
    assert 2 * (model.num_values(1) - model.num_values(0)) == KV_TOKEN_BYTES[name]


def test_the_demo_drafter_is_the_one_we_ship() -> None:
    config = json.loads((demo_drafter_dir() / "config.json").read_text(encoding="utf-8"))
    drafter = load_model("SmolLM2-135M").drafter
    assert drafter.draft_block_size == config["block_size"]
    assert drafter.num_layers == config["num_hidden_layers"]
    assert drafter.vocab_size == config["draft_vocab_size"]
    assert drafter.num_taps == len(config["dflash_config"]["target_layer_ids"])
    assert (drafter.hidden_size, drafter.intermediate_size) == (config["hidden_size"], config["intermediate_size"])
    heads = (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    assert (drafter.num_heads, drafter.num_kv_heads, drafter.head_dim) == heads


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=f"target_device='H20' is invalid: must be one of {', '.join(device_names())}"
    ):
        load_device("H20")
    with pytest.raises(ConfigError, match=f"model='Qwen' is invalid: must be one of {', '.join(model_names())}"):
        load_model("Qwen")
