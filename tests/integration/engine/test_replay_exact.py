# SPDX-License-Identifier: Apache-2.0
"""Replayed rounds are those of the engine: a trained tiny drafter, prompts that end by a stop id and by their limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from adaflash.config import EngineConfig
from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from adaflash.request import RequestOutput, SamplingParams
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_loader import load_drafter
from adaflash.training.replay import ReplayResult, replay
from adaflash.training.supervision import Supervision
from tests.engines import TinySetup, random_prompts, run_all, tiny_engine
from tests.training_setups import TrainingSetup

MAX_TOKENS = 24
NUM_STEPS = 120
PROMPTS = random_prompts(32, 97, 20)
POSITIONS = {"trained": 512, "trained_short": 32}
"""Positions of each drafter; the trajectories reach past the second one's."""


class Recorded(NamedTuple):
    """A target with drafters that learned some of its trajectories, and all of these."""

    setup: TinySetup
    params: SamplingParams
    replies: list[RequestOutput]
    supervisions: list[Supervision]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_setup: Callable[[str], TinySetup]) -> Recorded:
    setup = tiny_setup("llama")
    training = TrainingSetup(setup.target, setup.drafters["random"])
    parts = training.parts(anchors_per_trajectory=8, train_length_head=False)
    params = _params_with_a_stop_id(setup)
    replies = run_all(tiny_engine(setup, None), PROMPTS, params)
    trajectories = [
        training.trajectory_of([*reply.prompt_token_ids, *reply.outputs[0].token_ids], len(reply.prompt_token_ids))
        for reply in replies
    ]
    supervisions = list(map(parts.supervisor.supervise, trajectories))
    generator = torch.Generator().manual_seed(0)
    for step in range(NUM_STEPS):
        first = 4 * step % 16  # Half of them, so that the others are drafted badly.
        parts.learner.step(supervisions[first : first + 4], generator)
    drafters = {}
    for name, num_positions in POSITIONS.items():
        drafters[name] = tmp_path_factory.mktemp(name)
        parts.learner.write(drafters[name])
        _set_positions(drafters[name], num_positions)
    return Recorded(TinySetup(setup.model, setup.target, drafters), params, replies, supervisions)


def _params_with_a_stop_id(setup: TinySetup) -> SamplingParams:
    """Greedy, with a token that comes up in the middle of an output as stop id."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = [reply.outputs[0].token_ids for reply in run_all(tiny_engine(setup, None), PROMPTS, params)]
    stop = next(ids[k] for ids in outputs for k in range(8, len(ids) - 4) if ids.index(ids[k]) == k)
    return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=(stop,))


def _set_positions(directory: Path, num_positions: int) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": num_positions}))


def load(setup: TinySetup, name: str) -> DFlashDrafter:
    target = load_target(setup.target, Backend("cpu"))
    return load_drafter(setup.drafters[name], target, target.backend)


@pytest.mark.parametrize("drafter", POSITIONS)
@pytest.mark.parametrize(
    ("max_verified", "threshold"), [(None, None), (2, None), (None, 0.3), (2, 0.6)], ids=["fixed", "2", "0.3", "2-0.6"]
)
def test_replayed_rounds_are_those_of_the_engine(
    recorded: Recorded, drafter: str, max_verified: int | None, threshold: float | None
) -> None:
    setup, params, replies, supervisions = recorded
    config = EngineConfig(
        verify_policy="fixed" if threshold is None else "confidence",
        confidence_threshold=0.3 if threshold is None else threshold,
        num_speculative_tokens=max_verified,
        max_num_seqs=8,
    )
    served = run_all(tiny_engine(setup, drafter, config), PROMPTS, params)
    unpacked = load(setup, drafter)
    results = [
        replay(unpacked, supervision.sequence, supervision.taps, max_verified, threshold, MAX_TOKENS)
        for supervision in supervisions
    ]
    for reply, plain, result in zip(served, replies, results, strict=True):
        assert reply.outputs[0].token_ids == plain.outputs[0].token_ids
        stats = reply.speculation
        replayed = (result.num_rounds, result.num_verified_tokens, result.num_accepted_tokens)
        assert replayed == (stats.num_rounds, stats.num_verified_tokens, stats.num_accepted_tokens)
        assert result.num_emitted_tokens == stats.num_emitted_tokens
    total = ReplayResult.total(results)
    assert 0 < total.num_accepted_per_position[1] < total.num_verified_per_position[1]
    assert {reply.outputs[0].finish_reason for reply in served} == {"stop", "length"}


def test_the_policies_and_drafters_compared_do_differ(recorded: Recorded) -> None:
    """Otherwise a replay that ignores its arguments would pass."""
    rounds, verified = set(), set()
    for name in POSITIONS:
        drafter = load(recorded.setup, name)
        for max_verified, threshold in ((None, None), (2, None), (None, 0.3), (2, 0.6)):
            results = [
                replay(drafter, item.sequence, item.taps, max_verified, threshold, MAX_TOKENS)
                for item in recorded.supervisions
            ]
            total = ReplayResult.total(results)
            rounds.add(total.num_rounds)
            verified.add(total.num_verified_tokens)
    assert len(rounds) >= 5
    assert len(verified) == 8
