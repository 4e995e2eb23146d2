# SPDX-License-Identifier: Apache-2.0
"""Reads a DFlash drafter from its directory and checks that it fits the target; `dflash` is what it computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from adaflash.errors import CheckpointError
from adaflash.models.base import ModelConfig
from adaflash.models.checkpoint import Checkpoint, ProgressFn
from adaflash.models.layers import checkpoint_slots
from adaflash.ops.backend import Backend, LinearFn
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_config import DrafterConfig, load_drafter_config

LENGTH_HEAD_PREFIX = "thresh_head_two_model."
ALIASES = (("midlayer.", "layers.0."), ("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))
OWN_TENSORS = {"embed_tokens.weight": "embedding", "lm_head.weight": "LM head"}


class HeadLender(Protocol):
    """What a drafter needs of its target: a `TargetModel` has it, and so has a trainer without the target's layers."""

    config: ModelConfig
    dtype: torch.dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `TargetModel.embed`."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `TargetModel.compute_logits`."""

    def reduced_head(self, token_ids: Tensor) -> LinearFn:
        """See `TargetModel.reduced_head`."""


def load_drafter(
    directory: Path,
    target: HeadLender,
    backend: Backend,
    dtype: torch.dtype | None = None,
    progress: ProgressFn | None = None,
) -> DFlashDrafter:
    """Load a drafter for `target`; call before `target.pack`, since a reduced LM head copies rows of the target's.

    Args:
        directory: Holds `config.json` and safetensors.
        target: Lends its embedding and LM head.
        backend: Where the ops run.
        dtype: Computation dtype; None takes the target's.
        progress: Called with (bytes done, bytes in total).

    Raises:
        CheckpointError: A file is missing or corrupt, the drafter does not fit the target, or is of a kind not
            supported; names the field or tensor, its value and what was expected.
    """
    config = load_drafter_config(directory)
    check_fits_target(config, target.config, directory)
    checkpoint = Checkpoint(directory)
    _rename(checkpoint)
    _check_tensors(checkpoint, config)
    column_token_ids = _read_column_token_ids(checkpoint, config)
    if column_token_ids is not None:
        column_token_ids = column_token_ids.to(backend.device)
    head = target.compute_logits if column_token_ids is None else target.reduced_head(column_token_ids)
    drafter = DFlashDrafter(config, target.embed, head, column_token_ids, backend, dtype or target.dtype)
    _load_weights(checkpoint, drafter, progress)
    return drafter


def load_version(directory: Path, served: DFlashDrafter, version: int) -> DFlashDrafter:
    """Load other weights of a drafter that is being served; embedding, LM head and draft vocabulary stay `served`'s.

    Args:
        directory: Holds `config.json` and safetensors.
        served: The drafter whose shapes they must have.
        version: Number of the weights.

    Raises:
        CheckpointError: A file is missing or corrupt, or it is not the same architecture; names field or tensor.
    """
    config = load_drafter_config(directory)
    for field in dataclasses.fields(DrafterConfig):
        value, expected = getattr(config, field.name), getattr(served.config, field.name)
        if value != expected:
            raise CheckpointError(f"drafter {directory}: {field.name}={value} differs from {expected}, which is served")
    checkpoint = Checkpoint(directory)
    _rename(checkpoint)
    _check_tensors(checkpoint, config)
    column_token_ids = _read_column_token_ids(checkpoint, config)
    if column_token_ids is None or served.column_token_ids is None:
        same_columns = column_token_ids is served.column_token_ids
    else:
        same_columns = torch.equal(column_token_ids, served.column_token_ids.cpu())
    if not same_columns:
        raise CheckpointError(f"drafter {directory}: d2t differs from the draft vocabulary that is served")
    drafter = DFlashDrafter(config, served.embed, served.head, served.column_token_ids, served.backend, served.dtype)
    drafter.version = version
    _load_weights(checkpoint, drafter, None)
    return drafter


def _load_weights(checkpoint: Checkpoint, drafter: DFlashDrafter, progress: ProgressFn | None) -> None:
    ignored = ("d2t", "t2d", r".*rotary_emb\.inv_freq")
    checkpoint.load(drafter_slots(drafter), "the drafter of its config.json", ignored, progress)
    drafter.rebuild_fused()
    drafter.identify_context()


def drafter_slots(drafter: DFlashDrafter) -> dict[str, Tensor]:
    """Return the drafter's parameters by checkpoint name; writing into them changes it, then call `rebuild_fused`."""
    return {
        LENGTH_HEAD_PREFIX + name.removeprefix("length_head.") if name.startswith("length_head.") else name: tensor
        for name, tensor in checkpoint_slots(drafter).items()
    }


def check_fits_target(config: DrafterConfig, target: ModelConfig, directory: Path) -> None:
    """Check that a drafter was made for a target like this one.

    Raises:
        CheckpointError: Names the first field that differs, its value, and the target's.
    """
    for field, value, expected in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if value != expected:
            raise CheckpointError(f"drafter {directory}: {field}={value} does not fit the target: must be {expected}")
    if config.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"drafter {directory}: mask_token_id={config.mask_token_id} does not fit the target: "
            f"must be < vocab_size={target.vocab_size}"
        )


def canonical_name(name: str) -> str:
    """Return a tensor's name without the prefix `model.` and with other projects' spellings replaced."""
    name = name.removeprefix("model.")
    for alias, replacement in ALIASES:
        if name.startswith(alias):
            return replacement + name.removeprefix(alias)
    return name


def _rename(checkpoint: Checkpoint) -> None:
    originals: dict[str, str] = {}
    for name in checkpoint.entries:
        other = originals.setdefault(canonical_name(name), name)
        if other != name:
            raise CheckpointError(f"drafter {checkpoint.directory}: tensors {other} and {name} are the same parameter")
    checkpoint.entries = {canonical: checkpoint.entries[name] for canonical, name in originals.items()}


def _check_tensors(checkpoint: Checkpoint, config: DrafterConfig) -> None:
    """Check what deserves a better message than a list of misfits."""
    for name, entry in checkpoint.entries.items():
        if name in OWN_TENSORS:
            raise CheckpointError(
                f"drafter {checkpoint.directory}: tensor {name} is not supported: "
                f"a drafter with its own {OWN_TENSORS[name]}; DFlash uses the target's"
            )
        if name.endswith("weight") and not entry.dtype.is_floating_point:
            raise CheckpointError(
                f"drafter {checkpoint.directory}: tensor {name} is {entry.dtype}: quantised drafters are not supported"
            )
    num_taps, hidden_size = len(config.tap_layer_ids), config.hidden_size
    fc, expected = checkpoint.entries.get("fc.weight"), (hidden_size, num_taps * hidden_size)
    if fc is not None and fc.shape != expected:
        raise CheckpointError(
            f"drafter {checkpoint.directory}: fc.weight is {list(fc.shape)}: must be {list(expected)}, "
            f"hidden_size by hidden_size times the {num_taps} target_layer_ids {list(config.tap_layer_ids)}"
        )


def _read_column_token_ids(checkpoint: Checkpoint, config: DrafterConfig) -> Tensor | None:
    """Return the target id of each draft id, from the offsets `d2t`; None when the vocabulary is the target's."""
    entry = checkpoint.entries.get("d2t")
    num_columns = config.draft_vocab_size
    if entry is None:
        if num_columns not in (None, config.vocab_size):
            raise CheckpointError(
                f"drafter {checkpoint.directory}: tensor d2t is missing: "
                f"draft_vocab_size={num_columns} differs from vocab_size={config.vocab_size}"
            )
        return None
    offsets = entry.read()
    if offsets.is_floating_point() or offsets.dim() != 1 or (num_columns or len(offsets)) != len(offsets):
        raise CheckpointError(
            f"drafter {checkpoint.directory}: d2t is {list(offsets.shape)} {offsets.dtype}: "
            f"must be integers [draft_vocab_size={num_columns}]"
        )
    token_ids = torch.arange(len(offsets)) + offsets.long()  # [Vd]
    in_range = bool(((token_ids >= 0) & (token_ids < config.vocab_size)).all())
    if not in_range or len(set(token_ids.tolist())) != len(token_ids):
        raise CheckpointError(
            f"drafter {checkpoint.directory}: draft id + d2t[draft id] must be distinct ids in "
            f"[0, {config.vocab_size}), found {int(token_ids.min())} to {int(token_ids.max())}"
        )
    return token_ids
