# SPDX-License-Identifier: Apache-2.0
"""A drafter learns the same from features captured while serving as from those the trainer recomputes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from adaflash.config import EngineConfig
from adaflash.engine.capture import CaptureConfig
from adaflash.engine.engine import Engine
from adaflash.ops.registry import load_backend
from adaflash.request import EngineStats, SamplingParams
from adaflash.training.blocks import make_blocks, sample_anchors
from adaflash.training.drafter_forward import draft_hidden
from adaflash.training.learner import make_loss
from adaflash.training.row_losses import DraftHead
from adaflash.training.target_head import TargetHead
from adaflash.training.trainer_config import LossName, TrainerConfig
from adaflash.training.trainer_parts import TrainerParts
from adaflash.training.trajectories import Trajectory, TrajectoryFeatures
from tests.engines import TinySetup, random_prompts, step_until_done
from tests.training_setups import TrainingSetup

VOCAB = 97
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True)
CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    verify_policy="fixed",
    max_num_seqs=8,
    num_kv_blocks=64,
    max_model_len=96,
    block_size=8,
)
TOLERANCE, ROUNDING = 1e-5, 1e-6  # absolute; and of fp32 sums, relative, where a loss is above 10
LOSSES: tuple[LossName, ...] = ("reverse_kl", "ce")  # the default, and the one without the target's distribution


@dataclass
class Outbox:
    taken: list[Trajectory] = field(default_factory=list)

    def put(self, trajectory: Trajectory) -> bool:
        self.taken.append(trajectory)
        return True


@dataclass(frozen=True)
class Trained:
    """A target, a drafter for it, and what a trainer makes of trajectories of both."""

    setup: TinySetup
    parts: TrainerParts
    head: DraftHead

    def captured(self, change: dict[str, object], params: SamplingParams) -> tuple[list[Trajectory], EngineStats]:
        """Return the trajectories of prompts that came in two waves, most of the second ones in the prefix cache."""
        outbox = Outbox()
        config = replace(CONFIG, model=str(self.setup.target), draft=str(self.setup.drafters["random"]), **change)  # type: ignore[arg-type]
        engine = Engine(config, capture=CaptureConfig(outbox, self.parts.target_digest))
        first = random_prompts(5, VOCAB, 30)
        for wave in (first, [[*prompt, 7, 8, 9] for prompt in first] + random_prompts(1, VOCAB, 30, seed=1)):
            for prompt in wave:
                engine.add_request(prompt, params)
            step_until_done(engine, lambda _: None)
        engine.close()
        return outbox.taken, engine.stats()

    def losses(self, trajectory: Trajectory, anchors: Tensor) -> list[float]:
        """Return the loss of each of `LOSSES` before a step on the blocks at some anchors."""
        self.parts.supervisor.check(trajectory)
        supervision, drafter = self.parts.supervisor.supervise(trajectory), self.parts.learner.drafter
        blocks = make_blocks([supervision.sequence], [anchors], drafter.draft_block_size, drafter.mask_token_id)
        labels = self.head.columns(supervision.top1[blocks.teacher_rows].clamp_min(0))
        with torch.no_grad():
            drafted = draft_hidden(drafter, supervision.taps, blocks)[:, 1:]
            teacher = supervision.hidden[blocks.teacher_rows]
            functions = [make_loss(TrainerConfig(loss=name)) for name in LOSSES]
            return [each(drafted, teacher, labels, blocks.label_mask, self.head).loss.item() for each in functions]

    def all_anchors(self, trajectory: Trajectory) -> Tensor:
        num_tokens = len(trajectory.token_ids)
        mask = torch.arange(num_tokens) >= trajectory.num_prompt_tokens
        return sample_anchors(mask, num_tokens, torch.Generator(), self.parts.learner.drafter.draft_block_size)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def trained(request: pytest.FixtureRequest, tiny_setup: Callable[[str], TinySetup]) -> Trained:
    setup = tiny_setup(request.param)
    parts = TrainingSetup(setup.target, setup.drafters["random"]).parts()
    drafter = parts.learner.drafter
    target_head = TargetHead(setup.target, load_backend("cpu"))
    return Trained(setup, parts, DraftHead(target_head.weight, drafter.column_token_ids, drafter.mask_token_id))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, n=2)], ids=["greedy", "sampled", "two samples"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"max_num_batched_tokens": 11},
        {"num_kv_blocks": 16},
        {"enable_prefix_caching": False},
    ],
    ids=["prefix cache", "chunked prefill", "preemption", "no prefix cache"],
)
def test_captured_and_recomputed_features_teach_the_same(
    trained: Trained, change: dict[str, object], params: SamplingParams
) -> None:
    trajectories, stats = trained.captured(change, params)
    assert len(trajectories) == 11 * params.n
    assert stats.num_verified_tokens > 0
    if "num_kv_blocks" in change:
        assert stats.num_preemptions > 0
    else:
        assert (stats.num_cached_tokens > 0) == change.get("enable_prefix_caching", True)
    num_recomputed = trained.parts.supervisor.num_recomputed
    for trajectory in trajectories:
        assert trajectory.features is not None
        anchors = trained.all_anchors(trajectory)
        assert len(anchors) == 19
        captured = trained.losses(trajectory, anchors)
        recomputed = trained.losses(replace(trajectory, features=None), anchors)
        np.testing.assert_allclose(captured, recomputed, rtol=ROUNDING, atol=TOLERANCE)
    assert trained.parts.supervisor.num_recomputed == num_recomputed + len(trajectories)


def test_features_of_neighbouring_tokens_teach_something_else(trained: Trained) -> None:
    """What the test above would say of a row that is off by one, or of wrong taps alone."""
    trajectories, _ = trained.captured({}, GREEDY)
    trajectory = trajectories[0]
    assert trajectory.features is not None
    anchors, (taps, hidden) = trained.all_anchors(trajectory), trajectory.features
    right = np.array(trained.losses(trajectory, anchors))
    for wrong in ((np.roll(taps, 1, 0), hidden), (taps, np.roll(hidden, 1, 0)), (np.roll(taps, 1, 1), hidden)):
        features = TrajectoryFeatures(*wrong)
        assert (np.abs(trained.losses(replace(trajectory, features=features), anchors) - right) > 100 * TOLERANCE).all()
