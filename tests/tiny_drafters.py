# SPDX-License-Identifier: Apache-2.0
"""Writes tiny DFlash drafters that fit a tiny target: config and safetensors in the public format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

Weights = Literal["random", "zero"]
HEAD_DIM_BOTTLENECK = 8


class TinyDrafterBuilder(Protocol):
    """Writes `config.json` and `model.safetensors` of a drafter for the target in `target`; returns its directory.

    `config` overrides top-level keys, `dflash_config` nested ones. `draft_vocab_size` adds `d2t`, `length_head` the
    head's keys and tensors. Default: 2 layers, 4 / 2 heads x 16, block size 4, taps on the first and last layer, mask
    id = vocab_size - 1.
    """

    def __call__(
        self,
        directory: Path,
        target: Path,
        config: Mapping[str, object] | None = None,
        dflash_config: Mapping[str, object] | None = None,
        draft_vocab_size: int | None = None,
        length_head: bool = False,
        weights: Weights = "random",
        seed: int = 0,
    ) -> Path: ...


def write_tiny_drafter(
    directory: Path,
    target: Path,
    config: Mapping[str, object] | None = None,
    dflash_config: Mapping[str, object] | None = None,
    draft_vocab_size: int | None = None,
    length_head: bool = False,
    weights: Weights = "random",
    seed: int = 0,
) -> Path:
    """See `TinyDrafterBuilder`."""
    target_config = json.loads((target / "config.json").read_text())
    raw = tiny_config(target_config, draft_vocab_size, length_head)
    raw |= dict(config or {})
    nested = raw["dflash_config"]
    assert isinstance(nested, dict)
    raw["dflash_config"] = nested | dict(dflash_config or {})
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _values(name, shape, weights, generator) for name, shape in tensor_shapes(raw).items()}
    if draft_vocab_size is not None:
        token_ids = torch.randperm(target_config["vocab_size"], generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = token_ids - torch.arange(draft_vocab_size)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors")
    return directory


def tiny_config(target: Mapping[str, int], draft_vocab_size: int | None, length_head: bool) -> dict[str, object]:
    """Return the default `config.json`."""
    num_target_layers, num_layers = target["num_hidden_layers"], 2
    nested: dict[str, object] = {
        "mask_token_id": target["vocab_size"] - 1,
        "target_layer_ids": [0, num_target_layers - 1],
    }
    if length_head:
        nested |= {
            "use_thresh_head_two_model": True,
            "thresh_head_direct_len": True,
            "thresh_head_bottleneck_dim": HEAD_DIM_BOTTLENECK,
        }
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": num_target_layers,
        "num_hidden_layers": num_layers,
        "hidden_size": target["hidden_size"],
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": draft_vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": target["max_position_embeddings"],
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * num_layers,
        "sliding_window": None,
        "dtype": "float32",
        "dflash_config": nested,
    }


def tensor_shapes(raw: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor a drafter with this config has, `d2t` apart."""
    sizes = {key: value for key, value in raw.items() if isinstance(value, int)}
    nested = raw["dflash_config"]
    assert isinstance(nested, dict)
    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q_size, kv_size = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    num_taps = len(nested["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    projections = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
    projections["o_proj"] = (hidden, q_size)
    for index in range(sizes["num_hidden_layers"]):
        layer = f"layers.{index}."
        for name, shape in projections.items():
            shapes[f"{layer}self_attn.{name}.weight"] = shape
            if raw["attention_bias"]:
                shapes[f"{layer}self_attn.{name}.bias"] = shape[:1]
        shapes |= {f"{layer}self_attn.{name}.weight": (dim,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{layer}mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    if nested.get("use_thresh_head_two_model"):
        bottleneck = nested["thresh_head_bottleneck_dim"]
        for name, shape in {
            "down": (bottleneck, 2 * hidden),
            "res.0": (bottleneck, bottleneck),
            "out": (1, bottleneck),
        }.items():
            shapes[f"thresh_head_two_model.{name}.weight"] = shape
            shapes[f"thresh_head_two_model.{name}.bias"] = shape[:1]
    return shapes


def _values(name: str, shape: tuple[int, ...], weights: Weights, generator: torch.Generator) -> Tensor:
    if weights == "zero":
        return torch.zeros(shape)
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    return noise * 0.3 if len(shape) == 1 else noise * 1.2 / shape[1] ** 0.5
