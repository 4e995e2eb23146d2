# SPDX-License-Identifier: Apache-2.0
"""Features of trajectories: captured and recomputed ones are the same, and bad trajectories are skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from adaflash.errors import CheckpointError
from adaflash.ops.registry import load_backend
from adaflash.training import supervision as module
from adaflash.training.supervision import SkippedTrajectoryError
from adaflash.training.target_head import TargetHead
from adaflash.training.trajectories import Trajectory, TrajectoryFeatures
from tests.conftest import TinyModelBuilder
from tests.training_setups import TrainingSetup


def test_recomputed_features_are_those_of_the_model(setup: TrainingSetup, tiny_qwen3: Any, tmp_path: Path) -> None:
    reference = tiny_qwen3(tmp_path, logit_scale=4.0)
    trajectory = setup.trajectory(num_prompt=5, num_response=30)
    got = setup.parts().supervisor.supervise(trajectory)
    ids = torch.tensor([trajectory.token_ids[:-1]])
    states = reference(ids, output_hidden_states=True)
    taps = torch.cat([states.hidden_states[i + 1][0] for i in (0,)], dim=-1)
    torch.testing.assert_close(got.taps[:, :32], taps, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.hidden, states.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
    assert torch.equal(got.top1[5:], states.logits[0, 5:].argmax(-1))
    assert got.top1[:5].tolist() == [-1] * 5


def test_the_loss_of_captured_and_recomputed_features_is_the_same(setup: TrainingSetup) -> None:
    trajectory = setup.trajectory(num_response=40)
    losses = []
    for one in (trajectory, setup.captured(trajectory)):
        parts = setup.parts()
        report = parts.learner.step([parts.supervisor.supervise(one)], torch.Generator().manual_seed(0))
        assert report is not None
        losses.append(report.loss)
        assert parts.supervisor.num_recomputed == (one.features is None)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_chunks_of_the_prefill_do_not_change_the_features(
    setup: TrainingSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = setup.trajectory(num_response=60), setup.trajectory(num_response=9, seed=1)
    whole = setup.parts().supervisor.supervise(long)
    monkeypatch.setattr(module, "CHUNK_TOKENS", 7)
    supervisor = setup.parts().supervisor
    supervisor.supervise(short)  # its cache is too small for the next one
    chunked = supervisor.supervise(long)
    torch.testing.assert_close(chunked.taps, whole.taps, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chunked.hidden, whole.hidden, atol=1e-5, rtol=1e-5)


def test_the_layers_share_the_embedding_and_the_head(setup: TrainingSetup) -> None:
    supervisor = setup.parts().supervisor
    assert supervisor._target is None
    supervisor.supervise(setup.trajectory())
    target: Any = supervisor._target
    assert target.lm_head.weight.data_ptr() == supervisor._head.weight.data_ptr()
    assert target.model.embed_tokens.weight.data_ptr() == supervisor._head.embedding.data_ptr()


def test_a_tied_head_is_read_once(tmp_path: Path, tiny_llama: TinyModelBuilder) -> None:
    tiny_llama(tmp_path, config={"tie_word_embeddings": True})
    head = TargetHead(tmp_path, load_backend("cpu"))
    assert head.weight is head.embedding


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_a_target_without_its_head_is_named(tmp_path: Path, tiny_llama: TinyModelBuilder, change: str) -> None:
    tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del tensors["lm_head.weight"]
    else:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:5].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight is .*: must be \[97, 32\]"):
        TargetHead(tmp_path, load_backend("cpu"))


def with_features(trajectory: Trajectory, num_rows: int, width: int = 64) -> Trajectory:
    features = TrajectoryFeatures(np.zeros((num_rows, width), np.float32), np.zeros((num_rows, 32), np.float32))
    return replace(trajectory, features=features)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("other_target", lambda t: replace(t, target_digest="another")),
        ("too_short", lambda t: replace(t, num_prompt_tokens=len(t.token_ids) - 1)),
        ("too_short", lambda t: replace(t, num_prompt_tokens=-1)),
        ("too_long", lambda t: replace(t, token_ids=t.token_ids * 5)),
        ("token_ids", lambda t: replace(t, token_ids=[*t.token_ids, 97])),
        ("token_ids", lambda t: replace(t, token_ids=[-1, *t.token_ids])),
        ("feature_shapes", lambda t: with_features(t, len(t.token_ids))),
        ("feature_shapes", lambda t: with_features(t, len(t.token_ids) - 1, 65)),
    ],
)
def test_a_trajectory_that_cannot_be_learned_from_is_skipped_and_counted(
    setup: TrainingSetup, reason: str, change: Any
) -> None:
    parts = setup.parts(max_trajectory_tokens=100)
    trajectory = change(setup.trajectory())
    with pytest.raises(SkippedTrajectoryError) as error:
        parts.supervisor.check(trajectory)
    assert error.value.reason == reason
    assert parts.window.add(trajectory) == 0
    assert parts.window.skipped == {reason: 1}
    assert len(parts.window) == 0


def test_features_that_are_not_finite_are_found_when_drawn(setup: TrainingSetup) -> None:
    parts = setup.parts()
    bad = with_features(setup.trajectory(), 23)
    assert bad.features is not None
    bad.features.taps[3, 3] = np.nan
    parts.window.add(bad)
    parts.window.add(setup.trajectory(seed=1))
    drawn = parts.window.draw(2, torch.Generator().manual_seed(0))
    assert [len(item.sequence.token_ids) for item in drawn] == [24]
    assert parts.window.skipped == {"not_finite": 1}
    assert parts.window.num_tokens == 24
