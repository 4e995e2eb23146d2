# SPDX-License-Identifier: Apache-2.0
"""Builders of tiny random models, shared by all tests; the transformers model they return is the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.engines import TinySetup
from tests.tiny_drafters import TinyDrafterBuilder, write_tiny_drafter

_TINY_CONFIG: dict[str, object] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class TinyModelBuilder(Protocol):
    """Saves a random model to `directory` and returns the transformers model (fp32, eval, eager attention).

    `config` overrides keys of the tiny config, `logit_scale` multiplies the LM head so that near ties are rare,
    `max_shard_size` (e.g. `20KB`) shards the files, and `dtype` is what is saved and returned.
    """

    def __call__(
        self,
        directory: Path,
        config: Mapping[str, object] | None = None,
        logit_scale: float = 1.0,
        max_shard_size: str = "5GB",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> PreTrainedModel: ...


def _randomise(model: PreTrainedModel, logit_scale: float, seed: int) -> None:
    """Weights of a scale at which attention and MLP matter; biases and norms are random too."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data.copy_(1 + 0.2 * noise)
        elif parameter.dim() == 1 or "embed_tokens" in name:
            parameter.data.copy_(noise * 0.5)
        else:
            parameter.data.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
    head: nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    head.weight.data.mul_(logit_scale)


def _builder(config_class: type[PreTrainedConfig], model_class: Any) -> TinyModelBuilder:
    def build(
        directory: Path,
        config: Mapping[str, object] | None = None,
        logit_scale: float = 1.0,
        max_shard_size: str = "5GB",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> PreTrainedModel:
        hf_config = config_class.from_dict(_TINY_CONFIG | dict(config or {}))
        hf_config._attn_implementation = "eager"
        model: PreTrainedModel = model_class(hf_config).to(dtype).eval().requires_grad_(False)
        _randomise(model, logit_scale, seed)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        return model

    return build


@pytest.fixture(scope="session")
def tiny_llama() -> TinyModelBuilder:
    return _builder(LlamaConfig, LlamaForCausalLM)


@pytest.fixture(scope="session")
def tiny_qwen3() -> TinyModelBuilder:
    return _builder(Qwen3Config, Qwen3ForCausalLM)


@pytest.fixture(scope="session")
def tiny_drafter() -> TinyDrafterBuilder:
    return write_tiny_drafter


@pytest.fixture(scope="session")
def tiny_setup(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: TinyModelBuilder,
    tiny_qwen3: TinyModelBuilder,
    tiny_drafter: TinyDrafterBuilder,
) -> Callable[[str], TinySetup]:
    """Builds a target of a family with a random and an all-zero drafter, both with length heads."""

    @functools.cache
    def build(family: str) -> TinySetup:
        directory = tmp_path_factory.mktemp(family)
        builder = {"llama": tiny_llama, "qwen3": tiny_qwen3}[family]
        model = builder(directory / "target", logit_scale=4.0)
        drafters = {
            weights: tiny_drafter(directory / weights, directory / "target", length_head=True, weights=weights)
            for weights in ("random", "zero")
        }
        return TinySetup(model, directory / "target", drafters)

    return build


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files in tests/golden")
