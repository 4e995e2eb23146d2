# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps: what moves, what does not, what is refused, and the weights as they are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaflash.errors import ConfigError
from adaflash.speculative.drafter_loader import drafter_slots
from adaflash.training.learner import Learner, StepReport, make_loss
from adaflash.training.losses import PositionClip, TermClip
from adaflash.training.payload import PayloadChecker
from adaflash.training.position_weights import CreditWeights
from adaflash.training.supervision import Supervision
from adaflash.training.trainer_config import TrainerConfig
from adaflash.training.trainer_parts import TrainerParts
from adaflash.training.version_directory import Publication
from adaflash.training.weight_store import WeightStore
from tests.tiny_drafters import TinyDrafterBuilder
from tests.training_setups import TrainingSetup


def supervised(setup: TrainingSetup, parts: TrainerParts, count: int = 2) -> list[Supervision]:
    return [parts.supervisor.supervise(setup.trajectory(num_response=30, seed=seed)) for seed in range(count)]


def steps(setup: TrainingSetup, parts: TrainerParts, count: int, seed: int = 0) -> list[StepReport]:
    batch, generator = supervised(setup, parts), torch.Generator().manual_seed(seed)
    reports = [parts.learner.step(batch, generator) for _ in range(count)]
    return [report for report in reports if report is not None]


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in drafter_slots(learner.drafter).items()}


def changed(setup: TrainingSetup, **settings: Any) -> set[str]:
    """Names of the tensors that three steps change."""
    parts = setup.parts(**settings)
    before = weights(parts.learner)
    steps(setup, parts, 3)
    return {name for name, tensor in weights(parts.learner).items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "ce"},
        {"loss": "reverse_kl"},
        {"loss": "forward_kl", "clip": "none"},
        {"loss": "reverse_kl", "clip": "position"},
        {"loss": "ce", "weighting": "credit"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_every_loss_falls(setup: TrainingSetup, settings: dict[str, Any]) -> None:
    reports = steps(setup, setup.parts(**settings), 60)
    assert all(report.is_applied for report in reports)
    first, last = reports[:6], reports[-6:]
    assert sum(r.cross_entropy for r in last) < 0.7 * sum(r.cross_entropy for r in first)
    assert sum(r.length_head_loss for r in last) < sum(r.length_head_loss for r in first)
    assert sum(r.agreement[0] for r in last) > sum(r.agreement[0] for r in first)


def test_a_report_says_what_the_step_was_about(setup: TrainingSetup) -> None:
    (report,) = steps(setup, setup.parts(anchors_per_trajectory=5), 1)
    assert report.num_anchors == 10
    assert 10 < report.num_tokens <= 30
    assert 1 <= report.acceptance_length <= 4
    assert len(report.agreement) == 3
    assert {"loss", "divergence", "clipped", "agreement_1", "acceptance_length"} <= report.figures().keys()
    assert all(math.isfinite(value) for value in report.figures().values())
    (report,) = steps(setup, setup.parts(loss="ce"), 1)
    assert math.isnan(report.divergence)
    assert "divergence" not in report.figures()


def test_a_step_moves_every_weight(setup: TrainingSetup) -> None:
    assert changed(setup) == set(drafter_slots(setup.parts().learner.drafter))


def test_a_frozen_context_leaves_what_makes_context_keys_and_values(setup: TrainingSetup) -> None:
    names = set(drafter_slots(setup.parts().learner.drafter))
    frozen = {n for n in names if n in ("fc.weight", "hidden_norm.weight")}
    frozen |= {n for n in names if any(part in n for part in ("k_proj", "v_proj", "k_norm"))}
    assert len(frozen) == 2 + 2 * 3
    assert changed(setup, freeze_context=True, weight_decay=0.1) == names - frozen


def test_the_length_head_can_be_left_alone(setup: TrainingSetup) -> None:
    names = set(drafter_slots(setup.parts().learner.drafter))
    head = {name for name in names if name.startswith("thresh_head")}
    assert len(head) == 6
    assert changed(setup, train_length_head=False) == names - head


def test_the_length_head_can_learn_alone(setup: TrainingSetup) -> None:
    moved = changed(setup, train_drafter=False)
    assert moved
    assert all(name.startswith("thresh_head") for name in moved)
    with pytest.raises(ConfigError, match="train nothing: this drafter has a length head"):
        changed(setup, train_drafter=False, train_length_head=False)


def test_weight_decay_spares_norms_and_biases(setup: TrainingSetup) -> None:
    groups = setup.parts(weight_decay=0.1, length_head_lr=7e-5).learner.optimizer._optimizer.param_groups
    kinds = {(group["lr"], group["weight_decay"], {p.dim() for p in group["params"]} == {2}) for group in groups}
    assert kinds == {(3e-3, 0.1, True), (3e-3, 0.0, False), (7e-5, 0.1, True), (7e-5, 0.0, False)}


def test_the_first_steps_are_small_and_fresh_moments_begin_again(setup: TrainingSetup, tmp_path: Path) -> None:
    def moved(parts: TrainerParts) -> float:
        """How far a step moves the weight that it moves most; AdamW's first step moves it by the rate."""
        before = weights(parts.learner)
        steps(setup, parts, 1)
        return max(float((t - before[name]).abs().max()) for name, t in weights(parts.learner).items())

    parts = setup.parts(lr=1e-2, length_head_lr=1e-2, warmup_steps=10)
    assert moved(parts) == pytest.approx(1e-3, rel=1e-2)
    assert moved(parts) > 1.5e-3
    parts.learner.optimizer.reset()
    assert moved(parts) == pytest.approx(1e-3, rel=1e-2)
    assert moved(setup.parts(lr=1e-2, length_head_lr=1e-2, warmup_steps=0)) == pytest.approx(1e-2, rel=1e-2)


def test_gradients_are_clipped(setup: TrainingSetup) -> None:
    parts = setup.parts(max_grad_norm=1e-3)
    (report,) = steps(setup, parts, 1)
    assert report.gradient_norm > 1e-3
    squares = [p.grad.square().sum() for n, p in parts.learner.drafter.named_parameters() if "length" not in n]
    assert math.sqrt(sum(squares)) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("spoil", ["loss", "gradient"])
def test_a_batch_that_is_not_finite_changes_nothing(
    setup: TrainingSetup, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = setup.parts()
    batch, generator = supervised(setup, parts), torch.Generator().manual_seed(0)
    parts.learner.step(batch, generator)
    before, state = weights(parts.learner), {n: t.clone() for n, t in parts.learner.optimizer.state().items()}
    if spoil == "loss":
        broken = [item._replace(taps=torch.full_like(item.taps, math.inf)) for item in batch]
        report = parts.learner.step(broken, generator)
    else:
        fc = parts.learner.drafter.get_parameter("fc.weight")
        handle = fc.register_hook(lambda gradient: gradient * math.nan)
        report = parts.learner.step(batch, generator)
        handle.remove()
    assert report is not None
    assert not report.is_applied
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(parts.learner).items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in parts.learner.optimizer.state().items())
    after = parts.learner.step(batch, generator)
    assert after is not None
    assert after.is_applied


def test_a_batch_without_anchors_is_no_step(setup: TrainingSetup) -> None:
    parts = setup.parts()
    short = parts.supervisor.supervise(setup.trajectory(num_prompt=24, num_response=0))
    assert parts.learner.step([short], torch.Generator()) is None


def bf16_drafter(setup: TrainingSetup, builder: TinyDrafterBuilder, directory: Path, **settings: Any) -> TrainingSetup:
    """The same drafter in bfloat16, as published ones are."""
    drafter = builder(directory, setup.target, config={"dtype": "bfloat16"}, length_head=True, **settings)
    tensors = load_file(drafter / "model.safetensors")
    save_file(
        {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}, drafter / "model.safetensors"
    )
    return TrainingSetup(setup.target, drafter)


def publish(learner: Learner, root: Path, digest: str) -> Path:
    store = WeightStore(root, check=PayloadChecker(learner.layout, digest).check)
    version = store.publish(learner.write, Publication(digest, 1))
    directory = store.get(version).directory
    store.close()
    return directory


def test_small_updates_add_up_in_masters_of_a_bfloat16_checkpoint(
    setup: TrainingSetup, tiny_drafter: TinyDrafterBuilder, tmp_path: Path
) -> None:
    parts = bf16_drafter(setup, tiny_drafter, tmp_path / "drafter").parts(lr=1e-6)
    start = parts.learner.drafter.get_parameter("fc.weight").detach().clone()
    steps(setup, parts, 5)
    moved = (parts.learner.drafter.get_parameter("fc.weight") - start).abs()
    assert 0 < moved.max() < 1e-5
    directory = publish(parts.learner, tmp_path / "store", parts.target_digest)
    published = load_file(directory / "model.safetensors")["fc.weight"]
    assert published.dtype == torch.bfloat16
    assert torch.equal(published, parts.learner.drafter.get_parameter("fc.weight").bfloat16())


def test_what_is_published_has_the_layout_of_the_checkpoint(
    setup: TrainingSetup, tiny_drafter: TinyDrafterBuilder, tmp_path: Path
) -> None:
    reduced = bf16_drafter(setup, tiny_drafter, tmp_path / "drafter", draft_vocab_size=41)
    parts = reduced.parts()
    steps(setup, parts, 2)
    directory = publish(parts.learner, tmp_path / "store", parts.target_digest)
    old, new = (load_file(path / "model.safetensors") for path in (reduced.drafter, directory))
    assert {n: (t.dtype, t.shape) for n, t in new.items()} == {n: (t.dtype, t.shape) for n, t in old.items()}
    assert torch.equal(new["d2t"], old["d2t"])
    assert not torch.equal(new["fc.weight"], old["fc.weight"])
    assert (directory / "config.json").read_bytes() == (reduced.drafter / "config.json").read_bytes()


def test_weights_of_a_version_are_taken_over(setup: TrainingSetup, tmp_path: Path) -> None:
    parts, others = setup.parts(), setup.parts()
    steps(setup, parts, 2)
    directory = publish(parts.learner, tmp_path / "store", parts.target_digest)
    steps(setup, others, 1)
    others.learner.load_weights(directory)
    trained = weights(parts.learner)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in weights(others.learner).items())
    assert not others.learner.optimizer.state()


def test_a_restored_state_continues_bit_by_bit(setup: TrainingSetup) -> None:
    whole, first, second = setup.parts(), setup.parts(), setup.parts()
    generator = torch.Generator().manual_seed(5)
    batch = supervised(setup, whole)
    for _ in range(6):
        whole.learner.step(batch, generator)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        first.learner.step(batch, generator)
    second.learner.load_state({name: tensor.clone() for name, tensor in first.learner.state().items()})
    for _ in range(3):
        second.learner.step(batch, generator)
    expected = whole.learner.state()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in second.learner.state().items())


def test_rows_that_are_frozen_after_a_restart_stay_where_they_are(setup: TrainingSetup) -> None:
    first, second = setup.parts(), setup.parts(freeze_context=True)
    steps(setup, first, 4)
    second.learner.load_state({name: tensor.clone() for name, tensor in first.learner.state().items()})
    before = {name: tensor.clone() for name, tensor in weights(second.learner).items()}
    steps(setup, second, 3)
    after = weights(second.learner)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not {name for name in moved if name.startswith(("fc.", "hidden_norm.")) or ".k_" in name or ".v_" in name}
    assert any(".q_proj." in name for name in moved), "the rest of the matrix goes on"


def missing(state: dict[str, Tensor]) -> None:
    del state["master/fc.weight"]


def misshapen(state: dict[str, Tensor]) -> None:
    state["moment/fc.weight/exp_avg"] = state["moment/fc.weight/exp_avg"][:3]


@pytest.mark.parametrize(("spoil", "error"), [(missing, KeyError), (misshapen, ValueError)])
def test_a_state_that_does_not_fit_is_refused(
    setup: TrainingSetup, spoil: Callable[[dict[str, Tensor]], None], error: type[Exception]
) -> None:
    parts = setup.parts()
    steps(setup, parts, 1)
    state = parts.learner.state()
    spoil(state)
    with pytest.raises(error):
        setup.parts().learner.load_state(state)


def test_a_config_names_the_loss() -> None:
    loss = make_loss(TrainerConfig(loss="forward_kl", alpha=0.3, clip="position", clip_share=0.2, weighting="credit"))
    assert (loss.alpha, loss.divergence, loss.clip) == (0.3, "forward_kl", PositionClip(0.2))
    assert loss.weighting == CreditWeights(0.5)
    default = make_loss(TrainerConfig())
    assert (default.alpha, default.clip, default.weighting) == (0.8, TermClip(0.5), CreditWeights(0.5))
    assert make_loss(TrainerConfig(loss="ce")).alpha == 1.0
