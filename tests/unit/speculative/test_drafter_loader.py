# SPDX-License-Identifier: Apache-2.0
"""Loading drafters: spellings of tensor names, the fit to the target, and errors that name the culprit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaflash.errors import CheckpointError
from adaflash.models.base import TargetModel
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_loader import drafter_slots, load_drafter
from tests.conftest import TinyModelBuilder
from tests.tiny_drafters import TinyDrafterBuilder

Edit = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def load(target: TargetModel) -> Callable[[Path], DFlashDrafter]:
    return lambda directory: load_drafter(directory, target, target.backend)


def edit_tensors(directory: Path, edit: Edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def rename(tensors: dict[str, Tensor], spell: Callable[[str], str]) -> None:
    for name in list(tensors):
        tensors[spell(name)] = tensors.pop(name)


def vllm_spelling(name: str) -> str:
    for canonical, alias in {
        "layers.0.": "midlayer.",
        "fc.": "encoder.fc.",
        "hidden_norm.": "encoder.output_norm_enc.",
    }.items():
        if name.startswith(canonical):
            return alias + name.removeprefix(canonical)
    return name


@pytest.mark.parametrize(
    "spell",
    [lambda name: f"model.{name}", vllm_spelling, lambda name: f"model.{vllm_spelling(name)}"],
    ids=["model_prefix", "vllm", "both"],
)
def test_other_spellings_load_the_same_weights(
    tmp_path: Path,
    tiny_drafter: TinyDrafterBuilder,
    target_dir: Path,
    load: Callable[[Path], DFlashDrafter],
    spell: Callable[[str], str],
) -> None:
    directory = tiny_drafter(tmp_path, target_dir, draft_vocab_size=20, length_head=True)
    original = load(directory)
    edit_tensors(directory, lambda tensors: rename(tensors, spell))
    respelled = load(directory)
    slots = drafter_slots(respelled)
    assert all(torch.equal(tensor, slots[name]) for name, tensor in drafter_slots(original).items())
    assert original.column_token_ids is not None
    assert respelled.column_token_ids is not None
    assert torch.equal(original.column_token_ids, respelled.column_token_ids)


def test_every_tensor_of_the_file_arrives(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, load: Callable[[Path], DFlashDrafter]
) -> None:
    directory = tiny_drafter(tmp_path, target_dir, {"attention_bias": True}, length_head=True)
    drafter = load(directory)
    tensors = load_file(directory / "model.safetensors")
    slots = drafter_slots(drafter)
    assert slots.keys() == tensors.keys()
    assert all(torch.equal(slots[name], tensor) for name, tensor in tensors.items())
    assert drafter.version == 0
    assert drafter.tap_layer_ids == (0, 2)
    assert drafter.length_head is not None


def test_d2t_holds_offsets(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel
) -> None:
    directory = tiny_drafter(tmp_path, target_dir, draft_vocab_size=3)
    edit_tensors(directory, lambda tensors: tensors.update(d2t=torch.tensor([5, 5, 40])))
    drafter = load_drafter(directory, target, target.backend)
    assert drafter.column_token_ids is not None
    assert drafter.column_token_ids.tolist() == [5, 6, 42]
    hidden = torch.randn(2, 32)
    torch.testing.assert_close(drafter.head(hidden), target.compute_logits(hidden)[:, [5, 6, 42]])


def test_the_dtype_is_the_targets_unless_given(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel
) -> None:
    directory = tiny_drafter(tmp_path, target_dir, length_head=True)
    assert load_drafter(directory, target, target.backend).dtype == torch.float32
    half = load_drafter(directory, target, target.backend, dtype=torch.bfloat16)
    assert {
        name: tensor.dtype for name, tensor in drafter_slots(half).items() if "thresh" not in name
    } == dict.fromkeys((name for name in drafter_slots(half) if "thresh" not in name), torch.bfloat16)
    assert all(tensor.dtype == torch.float32 for name, tensor in drafter_slots(half).items() if "thresh" in name)


def test_progress_ends_at_the_total(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel
) -> None:
    calls: list[tuple[int, int]] = []
    directory = tiny_drafter(tmp_path, target_dir)
    load_drafter(directory, target, target.backend, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0


def test_a_llama_target_takes_a_drafter(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, tiny_llama: TinyModelBuilder, target: TargetModel
) -> None:
    tiny_llama(tmp_path / "target")
    directory = tiny_drafter(tmp_path / "drafter", tmp_path / "target")
    assert load_drafter(directory, target, target.backend).num_layers == 2


def drop(name: str) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return edit


def add(name: str, tensor: Tensor) -> Edit:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "culprits"),
    [
        (drop("layers.1.self_attn.q_norm.weight"), ["missing", "layers.1.self_attn.q_norm.weight"]),
        (drop("thresh_head_two_model.out.bias"), ["missing", "thresh_head_two_model.out.bias"]),
        (add("layers.2.mlp.up_proj.weight", torch.ones(2)), ["unexpected", "layers.2.mlp.up_proj.weight"]),
        (add("prob_head.weight", torch.ones(2)), ["unexpected", "prob_head.weight"]),
        (add("norm.weight", torch.ones(31)), ["norm.weight", "[32]", "[31]"]),
        (add("fc.weight", torch.ones(32, 96)), ["fc.weight is [32, 96]", "[32, 64]", "target_layer_ids [0, 2]"]),
        (add("lm_head.weight", torch.ones(2, 2)), ["lm_head.weight", "own LM head"]),
        (add("model.embed_tokens.weight", torch.ones(2, 2)), ["embed_tokens.weight", "own embedding"]),
        (add("model.norm.weight", torch.ones(32)), ["norm.weight", "model.norm.weight", "same parameter"]),
        (
            add("layers.0.mlp.up_proj.weight", torch.ones(40, 32, dtype=torch.int8)),
            ["layers.0.mlp.up_proj.weight", "torch.int8", "quantised"],
        ),
        (drop("d2t"), ["d2t is missing", "draft_vocab_size=20", "vocab_size=97"]),
        (add("d2t", torch.zeros(19, dtype=torch.int64)), ["d2t is [19]", "draft_vocab_size=20"]),
        (add("d2t", torch.zeros(20)), ["d2t", "torch.float32", "integers"]),
        (add("d2t", torch.full((20,), 90)), ["d2t", "distinct ids in [0, 97)", "109"]),
        (add("d2t", -torch.arange(20)), ["d2t", "distinct"]),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path,
    tiny_drafter: TinyDrafterBuilder,
    target_dir: Path,
    load: Callable[[Path], DFlashDrafter],
    edit: Edit,
    culprits: list[str],
) -> None:
    directory = tiny_drafter(tmp_path, target_dir, draft_vocab_size=20, length_head=True)
    edit_tensors(directory, edit)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    for culprit in culprits:
        assert culprit in str(error.value)


def test_a_head_the_config_does_not_announce_is_not_dropped_silently(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, load: Callable[[Path], DFlashDrafter]
) -> None:
    directory = tiny_drafter(tmp_path, target_dir, length_head=True)
    raw = json.loads((directory / "config.json").read_text())
    raw["dflash_config"]["use_thresh_head_two_model"] = False
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"unexpected: thresh_head_two_model\.down\.bias"):
        load(directory)


@pytest.mark.parametrize(
    ("config", "nested", "message"),
    [
        ({"hidden_size": 48}, {}, r"hidden_size=48 does not fit the target: must be 32"),
        ({"vocab_size": 96}, {}, r"vocab_size=96 does not fit the target: must be 97"),
        ({"num_target_layers": 4}, {}, r"num_target_layers=4 does not fit the target: must be 3"),
        ({}, {"mask_token_id": 97}, r"mask_token_id=97 does not fit the target: must be < vocab_size=97"),
        ({}, {"target_layer_ids": [0, 3]}, r"target_layer_ids=\[0, 3\] is invalid: must be in \[0, 3\)"),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    tmp_path: Path,
    tiny_drafter: TinyDrafterBuilder,
    target_dir: Path,
    load: Callable[[Path], DFlashDrafter],
    config: dict[str, object],
    nested: dict[str, object],
    message: str,
) -> None:
    directory = tiny_drafter(tmp_path, target_dir, config, nested)
    with pytest.raises(CheckpointError, match=message):
        load(directory)


def test_missing_weights_are_named(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, load: Callable[[Path], DFlashDrafter]
) -> None:
    directory = tiny_drafter(tmp_path, target_dir)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(directory)
