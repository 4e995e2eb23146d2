# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a target: what changes it and what does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaflash.errors import CheckpointError
from adaflash.models.checkpoint import SINGLE_FILE
from adaflash.models.digest import target_digest
from tests.conftest import TinyModelBuilder

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def target(tmp_path: Path, tiny_llama: TinyModelBuilder) -> Path:
    tiny_llama(tmp_path / "target")
    return tmp_path / "target"


def edit_config(directory: Path, key: str, value: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def edit_tensor(directory: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    tensors[NAME] = change(tensors[NAME])
    save_file(tensors, directory / SINGLE_FILE)


def test_a_copy_and_a_sharded_copy_have_the_same_digest(
    tmp_path: Path, target: Path, tiny_llama: TinyModelBuilder
) -> None:
    shutil.copytree(target, tmp_path / "copy")
    tiny_llama(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert target_digest(target) == target_digest(tmp_path / "copy") == target_digest(tmp_path / "sharded")


def test_another_end_token_leaves_the_digest(target: Path) -> None:
    before = target_digest(target)
    edit_config(target, "eos_token_id", [2, 3])
    assert target_digest(target) == before


@pytest.mark.parametrize(("key", "value"), [("rms_norm_eps", 1e-5), ("num_key_value_heads", 4), ("rope_theta", 5e5)])
def test_another_architecture_changes_the_digest(target: Path, key: str, value: object) -> None:
    before = target_digest(target)
    edit_config(target, "rope_parameters", None)
    if key == "rope_theta":
        assert target_digest(target) == before
    edit_config(target, key, value)
    assert target_digest(target) != before


@pytest.mark.parametrize("element", [0, 32 * 48 // 2, 32 * 48 - 1])
def test_one_changed_weight_changes_the_digest(target: Path, element: int) -> None:
    def bump(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[element] += 1
        return tensor

    before = target_digest(target)
    edit_tensor(target, bump)
    assert target_digest(target) != before


def test_another_dtype_changes_the_digest(target: Path) -> None:
    before = target_digest(target)
    edit_tensor(target, torch.Tensor.bfloat16)
    assert target_digest(target) != before


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        target_digest(tmp_path / "nowhere")
