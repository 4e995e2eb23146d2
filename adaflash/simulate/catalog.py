# SPDX-License-Identifier: Apache-2.0
"""The devices and models that can be simulated, read from `devices.json` and `models.json` beside this module."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from adaflash.config import suggest
from adaflash.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """What a device can do; `devices.json` says where each number comes from.

    Attributes:
        name: As in `devices.json`.
        description: Full name and what it computes in.
        value_bytes: Bytes of a weight, an activation, a KV value.
        memory_bytes: Memory for weights and KV.
        peak_flops: Nominal FLOP/s.
        peak_bytes_per_s: Nominal memory bandwidth.
        compute_fraction: Share of `peak_flops` that matmuls reach.
        bandwidth_fraction: Share of `peak_bytes_per_s` that is reached.
        attention_fraction: Share of what matmuls reach that attention's arithmetic reaches.
        fixed_s: Seconds of a target step whatever it computes.
        draft_fixed_s: The same of a draft step.
    """

    name: str
    description: str
    value_bytes: float
    memory_bytes: float
    peak_flops: float
    peak_bytes_per_s: float
    compute_fraction: float
    bandwidth_fraction: float
    attention_fraction: float
    fixed_s: float
    draft_fixed_s: float

    @property
    def flops(self) -> float:
        """FLOP/s that matmuls reach."""
        return self.peak_flops * self.compute_fraction

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that is reached."""
        return self.peak_bytes_per_s * self.bandwidth_fraction


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a DFlash drafter.

    Attributes:
        draft_block_size: W, anchor included.
        vocab_size: Columns of its logits; the target's vocabulary, or a reduced one.
        num_taps: Target layers whose output feeds its context.
    """

    draft_block_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_taps: int

    @property
    def num_drafts(self) -> int:
        """K, the drafts of a block."""
        return self.draft_block_size - 1


@dataclass(frozen=True)
class Model:
    """Sizes of a target and its drafter.

    Attributes:
        name: As in `models.json`.
        source: Where the sizes come from.
        intermediate_size: Of the MLP; of one expert in a mixture of experts.
        num_experts: 0 for a dense model.
    """

    name: str
    source: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int
    num_experts_per_token: int
    drafter: DrafterShape

    def num_values(self, num_kv_tokens: int) -> int:
        """Return the weights of target and drafter, and the KV values of both for so many tokens."""
        mlp = 3 * self.hidden_size * self.intermediate_size
        experts = self.num_experts * (mlp + self.hidden_size) if self.num_experts else mlp
        target = self.num_layers * (attention_weights(self) + experts) + 2 * self.vocab_size * self.hidden_size
        drafter = self.drafter
        layer = attention_weights(drafter) + 3 * drafter.hidden_size * drafter.intermediate_size
        drafter_weights = drafter.num_layers * layer + drafter.num_taps * drafter.hidden_size**2
        return target + drafter_weights + num_kv_tokens * (kv_values(self) + kv_values(drafter))


def attention_weights(shape: Model | DrafterShape) -> int:
    """Return the weights of a layer's Q, K, V and output projections."""
    return shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)


def kv_values(shape: Model | DrafterShape) -> int:
    """Return the K and V values of a token in all layers."""
    return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim


def device_names() -> list[str]:
    """Return the devices that can be simulated."""
    return list(_read("devices.json"))


def model_names() -> list[str]:
    """Return the models that can be simulated."""
    return list(_read("models.json"))


def load_device(name: str) -> Device:
    """Return the device of this name.

    Raises:
        ConfigError: There is none; lists those there are.
    """
    entries = _read("devices.json")
    entry = dict(entries[_known("target_device", name, entries)])
    description = entry.pop("description")
    return Device(name=name, description=description, **{key: float(cell["value"]) for key, cell in entry.items()})


def load_model(name: str) -> Model:
    """Return the model of this name.

    Raises:
        ConfigError: There is none; lists those there are.
    """
    entries = _read("models.json")
    entry = dict(entries[_known("model", name, entries)])
    drafter = DrafterShape(**entry.pop("drafter"))
    return Model(name=name, drafter=drafter, **entry)


def device_sources(name: str) -> dict[str, str]:
    """Return where each number of a device comes from, by the attribute's name."""
    entry = _read("devices.json")[name]
    numbers = [field.name for field in dataclasses.fields(Device) if field.name not in ("name", "description")]
    return {number: entry[number]["source"] for number in numbers}


def _known(field: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    if name not in names:
        allowed = ", ".join(names)
        raise ConfigError(f"{field}={name!r} is invalid: must be one of {allowed}{suggest(name, names)}")
    return name


def _read(file: str) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(resources.files(__package__).joinpath(file).read_text("utf-8"))
    return entries
