# SPDX-License-Identifier: Apache-2.0
"""Loading a target from a local Hugging Face directory, whatever its family."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from adaflash.errors import CheckpointError
from adaflash.models.base import ModelConfig, TargetModel
from adaflash.models.checkpoint import Checkpoint, ProgressFn
from adaflash.models.json_config import JsonConfig
from adaflash.models.layers import checkpoint_slots
from adaflash.models.llama import LlamaForCausalLM
from adaflash.models.qwen3 import Qwen3ForCausalLM
from adaflash.ops.backend import Backend

logger = logging.getLogger(__name__)

TARGETS: dict[str, type[LlamaForCausalLM] | type[Qwen3ForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def read_model_config(directory: Path) -> ModelConfig:
    """Parse `config.json` and, if there is one, `generation_config.json`.

    Raises:
        CheckpointError: The directory or a key is missing or invalid, the architecture is not supported, or the
            checkpoint is quantised.
    """
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint {directory} is not a directory")
    raw = JsonConfig.read(directory / "config.json")
    architectures = raw.texts("architectures")
    if not architectures or architectures[0] not in TARGETS:
        raise raw.error("architectures", "a supported one: " + ", ".join(TARGETS))
    quantization = raw.section("quantization_config")
    if quantization is not None:
        raise CheckpointError(
            f"{raw.path}: quantization_config.quant_method={quantization.get('quant_method')!r} is not supported: "
            "use the checkpoint in float32, bfloat16 or float16"
        )
    generation_path = directory / "generation_config.json"
    generation = JsonConfig.read(generation_path) if generation_path.exists() else None
    return TARGETS[architectures[0]].parse_config(raw, generation)


def load_target(
    directory: Path, backend: Backend, dtype: torch.dtype | None = None, progress: ProgressFn | None = None
) -> TargetModel:
    """Load a target; its weights are frozen and not packed yet.

    Args:
        directory: `config.json` and safetensors, in one file or sharded.
        backend: Where the weights go.
        dtype: To compute in; None takes the backend's preference for the checkpoint's dtype.
        progress: Called with (bytes read, bytes in total).

    Raises:
        CheckpointError: See `read_model_config` and `Checkpoint`.
    """
    config = read_model_config(directory)
    dtype = dtype or backend.preferred_dtype(config.dtype)
    checkpoint = Checkpoint(directory)
    model = TARGETS[config.architecture](config, backend, dtype)
    model.requires_grad_(False)
    # Old checkpoints carry the inverse frequencies; a tied head may be stored although the embedding is used.
    ignored = [r".*\.rotary_emb\.inv_freq"] + [r"lm_head\.weight"] * config.tie_word_embeddings
    checkpoint.load(checkpoint_slots(model), config.architecture, ignored, progress)
    logger.info("target loaded: architecture=%s dtype=%s directory=%s", config.architecture, dtype, directory)
    return model
