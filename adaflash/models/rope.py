# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: inverse frequencies of each rope kind, and the cos/sin of positions. Applying them is an op."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from adaflash.models.base import RopeConfig


class RotaryEmbedding:
    """Angles position * inv_freq, scaled as the rope kind says.

    Args:
        config: Kind, base and scaling.
        device: Where `cos_sin` runs.
    """

    def __init__(self, config: RopeConfig, device: torch.device | str) -> None:
        self.inv_freq = _INV_FREQ[config.kind](config).to(device)  # [rotary_dim / 2] fp32
        self.attention_scaling = _yarn_attention_factor(config.scaling) if config.kind == "yarn" else 1.0

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles, each [T, rotary_dim / 2] fp32, for positions [T]."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin, scaling = angles.cos(), angles.sin(), self.attention_scaling
        return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


def _default(config: RopeConfig) -> Tensor:
    """Return theta ** (-2i / rotary_dim) for i < rotary_dim / 2."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    return 1.0 / config.theta**exponents


def _linear(config: RopeConfig) -> Tensor:
    return _default(config) / config.scaling["factor"]


def _llama3(config: RopeConfig) -> Tensor:
    """Divide wavelengths beyond the original context by `factor`, keep the short ones, blend between."""
    scaling = config.scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    inv_freq = _default(config)
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # rotations in the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / scaling["factor"] + kept * inv_freq


def _yarn(config: RopeConfig) -> Tensor:
    """Blend interpolated and original frequencies by the number of rotations in the original context.

    Source: YaRN (arXiv:2309.00071), sec. 3.2.
    """
    scaling, dim = config.scaling, config.rotary_dim
    original = scaling["original_max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dim_of(scaling.get("beta_fast", 32.0)), dim_of(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high if high != low else high + 0.001  # the ramp has a width
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv_freq = _default(config)
    return inv_freq / scaling["factor"] * interpolated + inv_freq * (1 - interpolated)


def _yarn_attention_factor(scaling: dict[str, float]) -> float:
    """Factor on cos and sin: given, or 0.1 ln(factor) + 1, or the ratio of the two mscales."""
    if "attention_factor" in scaling:
        return scaling["attention_factor"]

    def mscale(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


# `dynamic` changes frequencies only beyond max_position_embeddings, which no request reaches.
_INV_FREQ: dict[str, Callable[[RopeConfig], Tensor]] = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}

ROPE_KINDS = tuple(_INV_FREQ)
