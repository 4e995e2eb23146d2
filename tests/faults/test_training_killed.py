# SPDX-License-Identifier: Apache-2.0
"""A training process killed at random points ends with exactly the weights of one that was not."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adaflash.training.trajectories import TrajectorySpool
from adaflash.training.weight_store import WeightStore
from tests.conftest import TinyModelBuilder
from tests.run_trainer import STEPS_PER_VERSION
from tests.tiny_drafters import TinyDrafterBuilder
from tests.training_setups import TrainingSetup

NUM_STEPS = 24
NUM_KILLS = 4
TIMEOUT_S = 240.0


@pytest.fixture
def setup(tmp_path: Path, tiny_qwen3: TinyModelBuilder, tiny_drafter: TinyDrafterBuilder) -> TrainingSetup:
    tiny_qwen3(tmp_path / "target")
    return TrainingSetup(tmp_path / "target", tiny_drafter(tmp_path / "drafter", tmp_path / "target", length_head=True))


def start(setup: TrainingSetup, root: Path, **settings: object) -> subprocess.Popen[str]:
    settings |= {
        "target": str(setup.target),
        "drafter": str(setup.drafter),
        "root": str(root),
        "num_steps": NUM_STEPS,
        "result": str(root / "result.safetensors"),
    }
    command = [sys.executable, "-m", "tests.run_trainer", json.dumps(settings)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def finish(process: subprocess.Popen[str], root: Path) -> dict[str, Tensor]:
    assert process.wait(TIMEOUT_S) == 0
    assert process.stdout is not None
    process.stdout.close()
    return load_file(root / "result.safetensors")


def kill_after(process: subprocess.Popen[str], seconds: float) -> int | None:
    """Kill it that long after it began to train; return the step it began at, None when it had come to its end."""
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
        assert line.startswith("ready"), "it starts"
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.kill()
        return int(line.split()[1]) if process.wait(TIMEOUT_S) < 0 else None


def test_a_killed_training_continues_to_the_same_weights(setup: TrainingSetup, tmp_path: Path) -> None:
    spool = TrajectorySpool(tmp_path / "whole" / "spool", 64 << 20, 1e6)
    for seed in range(6):
        spool.put(setup.trajectory(seed=seed, num_response=12 + seed))
    spool.close()
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    process = start(setup, tmp_path / "whole")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready 0\n"
    started = time.monotonic()
    expected = finish(process, tmp_path / "whole")
    training_s = time.monotonic() - started
    rng = random.Random(0)
    resumed_at = []
    for _ in range(NUM_KILLS):
        first_step = kill_after(start(setup, tmp_path / "killed"), rng.uniform(0, 0.6 * training_s))
        if first_step is None:
            break
        resumed_at.append(first_step)
    kill_after(start(setup, tmp_path / "killed", killed_at=NUM_STEPS), TIMEOUT_S)
    got = finish(start(setup, tmp_path / "killed"), tmp_path / "killed")
    assert resumed_at, "it was killed while it trained"
    assert all(step % STEPS_PER_VERSION == 0 for step in resumed_at)
    assert got.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in got.items())
    versions = []
    for name in ("whole", "killed"):
        store = WeightStore(tmp_path / name / "store")
        assert not store.damaged
        versions.append([v.manifest.train_step for v in store.versions()])
        store.close()
    assert versions[0] == versions[1] == [12, 16, 20, 24]
