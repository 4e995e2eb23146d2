# SPDX-License-Identifier: Apache-2.0
"""`adaflash trainer` and `adaflash train` as processes: ready line, versions, metrics, SIGTERM, restart."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.pb import trainer_pb2_grpc
from adaflash.rpc.trainer_convert import trajectory_to_pb
from adaflash.speculative.drafter_loader import load_drafter
from adaflash.training.trajectories import Trajectory
from tests.conftest import TinyModelBuilder
from tests.tiny_drafters import TinyDrafterBuilder
from tests.training_setups import TrainingSetup

TIMEOUT_S = 120.0
KEY = "trainer-token"


@pytest.fixture(scope="module")
def setup(
    tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: TinyModelBuilder, tiny_drafter: TinyDrafterBuilder
) -> TrainingSetup:
    directory = tmp_path_factory.mktemp("process")
    tiny_qwen3(directory / "target", logit_scale=4.0)
    return TrainingSetup(directory / "target", tiny_drafter(directory / "drafter", directory / "target"))


@dataclass
class Process:
    """A running trainer."""

    process: subprocess.Popen[str]
    address: str
    metrics: str

    def stub(self, channel: grpc.Channel) -> Any:
        return trainer_pb2_grpc.TrainerStub(channel)  # type: ignore[no-untyped-call]

    def status(self) -> pb.TrainerStatus:
        with grpc.insecure_channel(self.address) as channel:
            return self.stub(channel).GetStatus(pb.GetTrainerStatusRequest(), metadata=token(KEY), timeout=20)

    def submit(self, trajectories: list[Trajectory], key: str = KEY) -> pb.SubmitTrajectoriesResponse:
        with grpc.insecure_channel(self.address) as channel:
            messages = iter([trajectory_to_pb(trajectory) for trajectory in trajectories])
            return self.stub(channel).SubmitTrajectories(messages, metadata=token(key), timeout=20)

    def wait_for_version(self, version: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.status().newest_version < version:
            assert time.monotonic() < deadline, "no version was published"
            time.sleep(0.05)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)


def token(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@contextmanager
def running(setup: TrainingSetup, root: Path, *argv: str) -> Iterator[Process]:
    directories = [f"--{name}={root / name}" for name in ("store", "spool", "state")]
    command = [sys.executable, "-m", "adaflash.cli.main", "trainer", str(setup.target), "--draft", str(setup.drafter)]
    ports = ["--grpc-port=0", "--metrics-port=0", f"--api-key={KEY}"]
    pace = ["--device=cpu", "--num-threads=1", "--publish-interval-s=0.2", "--min-tokens=1", "--max-epochs=3"]
    process = subprocess.Popen(
        [*command, *directories, *ports, *pace, *argv], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            match = re.fullmatch(r"ready address=(\S+) metrics=(\S+)\n", process.stdout.readline())
            assert match is not None, "it says when it is ready"
            yield Process(process, match[1], match[2])
        finally:
            process.kill()
            process.wait(TIMEOUT_S)


def test_a_trainer_learns_publishes_and_continues_after_a_restart(setup: TrainingSetup, tmp_path: Path) -> None:
    with running(setup, tmp_path) as trainer:
        trajectories = [setup.captured(setup.trajectory(seed=0)), setup.trajectory(seed=1)]
        assert trainer.submit(trajectories).num_accepted == 2
        trainer.wait_for_version(1)
        with urllib.request.urlopen(trainer.metrics, timeout=20) as reply:
            text = reply.read().decode()
        assert "adaflash:trainer_recomputed_trajectories_total 1.0" in text
        assert "adaflash:trainer_base_version 1.0" in text
        assert trainer.terminate() == 0
    with running(setup, tmp_path) as trainer:
        before = trainer.status()
        assert before.newest_version >= 1
        assert trainer.submit([setup.trajectory(seed=2)]).num_accepted == 1
        trainer.wait_for_version(before.newest_version + 1)
        steps = [version.train_step for version in trainer.status().versions]
        assert steps == sorted(set(steps))
        assert trainer.terminate() == 0


def test_a_call_without_the_token_is_refused(setup: TrainingSetup, tmp_path: Path) -> None:
    with running(setup, tmp_path) as trainer:
        with pytest.raises(grpc.RpcError) as error:
            trainer.submit([setup.trajectory()], key="another")
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert trainer.terminate() == 0


def test_a_second_trainer_cannot_take_the_same_store(setup: TrainingSetup, tmp_path: Path) -> None:
    with running(setup, tmp_path):
        command = [sys.executable, "-m", "adaflash.cli.main", "trainer", str(setup.target)]
        argv = ["--draft", str(setup.drafter), "--store", str(tmp_path / "store"), "--device=cpu", "--grpc-port=0"]
        second = subprocess.run([*command, *argv], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert second.returncode == 2
    assert "is in use: another process writes to it" in second.stderr


def test_a_drafter_is_trained_on_a_file(setup: TrainingSetup, tmp_path: Path) -> None:
    lines = []
    for seed in range(8):
        sample = setup.trajectory(seed=seed % 2)
        lines.append(json.dumps({"token_ids": sample.token_ids, "num_prompt_tokens": sample.num_prompt_tokens}))
    data, output = tmp_path / "data.jsonl", tmp_path / "out" / "drafter"
    data.write_text("\n".join(lines))
    command = [sys.executable, "-m", "adaflash.cli.main", "train", str(setup.target), "--draft", str(setup.drafter)]
    argv = ["--data", str(data), "--output", str(output), "--holdout=0.25", "--device=cpu", "--lr=3e-3"]
    flags = ["--max-epochs=10", "--loss=ce", "--add-length-head", "--json"]
    done = subprocess.run([*command, *argv, *flags], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    report = json.loads(done.stdout)
    assert (report["num_samples"], report["num_held_out"], report["skipped"]) == (6, 2, {})
    assert report["num_steps"] > 0
    assert len(report["after"]["accepted_per_position"]) == 3
    assert sorted(path.name for path in output.parent.iterdir()) == ["drafter"]
    target = load_target(setup.target, Backend("cpu"))
    assert load_drafter(output, target, target.backend).config.length_head_dim == 256
