# SPDX-License-Identifier: Apache-2.0
"""Offline training: what it reports, what it holds out, and a new length head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adaflash.errors import CheckpointError, ConfigError
from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from adaflash.speculative.drafter_loader import load_drafter
from adaflash.training.new_length_head import add_length_head
from adaflash.training.offline import OfflineTraining
from adaflash.training.training_data import TokenSample
from tests.tiny_drafters import TinyDrafterBuilder
from tests.training_setups import TrainingSetup, tiny_config


def samples(setup: TrainingSetup, count: int, num_response: int = 24) -> list[TokenSample]:
    """The same few responses again and again, so that what is held out can be learned from the rest."""
    made = [setup.trajectory(num_response=num_response, seed=seed % 3) for seed in range(count)]
    return [TokenSample(t.token_ids, t.num_prompt_tokens) for t in made]


def train(setup: TrainingSetup, data: list[TokenSample], holdout: float = 0.25, **settings: Any) -> OfflineTraining:
    return OfflineTraining(tiny_config(loss="ce", **settings), setup.target, setup.drafter, data, holdout)


def test_training_says_what_it_brought(setup: TrainingSetup) -> None:
    training = train(setup, samples(setup, 12), max_epochs=20.0)
    seen: list[tuple[int, int]] = []
    result = training.run(lambda done, total, loss: seen.append((done, total)))
    assert (result.num_samples, result.num_held_out, result.num_tokens) == (9, 3, 9 * 24)
    assert result.before is not None
    assert result.after is not None
    assert result.before.num_emitted_tokens == result.after.num_emitted_tokens == 3 * 23
    assert seen == sorted(seen)
    assert seen[-1] == (20 * 9 * 23, 20 * 9 * 23)
    assert result.num_steps == len(seen)


def test_bad_samples_are_counted(setup: TrainingSetup) -> None:
    data = [*samples(setup, 3), TokenSample([1, 2, 97], 1), TokenSample([1, 2], 1)]
    result = train(setup, data, holdout=0.0, max_epochs=0.1).run()
    assert result.skipped == {"token_ids": 1, "too_short": 1}
    assert result.before is result.after is None
    assert result.num_samples == 3


@pytest.mark.parametrize("holdout", [-0.1, 1.0])
def test_a_holdout_out_of_range_is_refused(setup: TrainingSetup, holdout: float) -> None:
    with pytest.raises(ConfigError, match=r"holdout=.* is invalid: must be in \[0, 1\)"):
        train(setup, samples(setup, 2), holdout)


def test_without_anything_to_train_on_it_says_why(setup: TrainingSetup) -> None:
    with pytest.raises(ConfigError, match=r"nothing to train on: 1 samples, skipped {'too_short': 1}"):
        train(setup, [TokenSample([1, 2], 1)])


def test_samples_that_do_not_fit_into_memory_are_refused(setup: TrainingSetup) -> None:
    with pytest.raises(ConfigError, match="window_bytes=1000 is invalid: must be >= "):
        train(setup, samples(setup, 3), window_bytes=1000)


def test_a_new_length_head_is_trained_and_loaded(
    setup: TrainingSetup, tiny_drafter: TinyDrafterBuilder, tmp_path: Path
) -> None:
    plain = tiny_drafter(tmp_path / "plain", setup.target)
    with_head, trained = tmp_path / "with_head", tmp_path / "trained"
    with_head.mkdir()
    trained.mkdir()
    add_length_head(plain, with_head, seed=3, bottleneck_dim=16)
    training = train(TrainingSetup(setup.target, with_head), samples(setup, 6), max_epochs=3.0)
    training.run()
    training.write(trained)
    target = load_target(setup.target, Backend("cpu"))
    drafter = load_drafter(trained, target, target.backend)
    assert drafter.length_head is not None
    assert drafter.config.length_head_dim == 16
    old, new = load_file(with_head / "model.safetensors"), load_file(trained / "model.safetensors")
    name = "thresh_head_two_model.out.weight"
    assert new[name].dtype == torch.float32
    assert not torch.equal(new[name], old[name])
    untouched = load_file(plain / "model.safetensors")
    assert all(torch.equal(old[n], tensor) for n, tensor in untouched.items())
    assert json.loads((trained / "config.json").read_text())["dflash_config"]["mask_token_id"] == 96


def test_a_second_length_head_is_refused(setup: TrainingSetup, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has a length head already"):
        add_length_head(setup.drafter, tmp_path, seed=0)
