# SPDX-License-Identifier: Apache-2.0
"""Trainers and servers die, as by `kill -9`, while trajectories are on their way; each arrives once all the same."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from adaflash.training.spool_segment import Buffer, Segment
from adaflash.training.trajectories import START, TrajectorySpool
from tests.serving import run
from tests.trainer_process import line_of, start_module, trainer_process
from tests.trainers import training
from tests.uploads import eventually, open_spool, trajectory, uploading
from tests.versions import tiny_drafter


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("tiny"))


def assert_each_once(names: list[str], count: int) -> None:
    assert Counter(names) == Counter(f"r{index}" for index in range(count))


def test_a_trainer_killed_at_any_trajectory_has_each_exactly_once(tmp_path: Path, drafter: Path) -> None:
    rng = random.Random(20261130)
    deaths = [("before_take", 1), ("after_take", 1), ("after_take", 2), ("before_take", 5), ("after_take", 8)]
    deaths += [(rng.choice(["before_take", "after_take"]), rng.randint(1, 12)) for _ in range(5)]
    spool = open_spool(tmp_path / "spool")

    async def scenario() -> None:
        async with trainer_process(tmp_path, drafter, keeps_trajectories=True) as trainer:
            assert all(spool.take(trajectory(index, num_features=index % 30)) for index in range(150))
            await trainer.start(*deaths[0])
            async with uploading(trainer.address, spool, timeout_s=5.0) as uploader:
                await trainer.has_died()
                for death in deaths[1:]:
                    await trainer.start(*death)
                    await trainer.has_died()
                assert uploader.status.position < spool.end
                await trainer.start()
                await eventually(lambda: uploader.status.position == spool.end)
                counters = uploader.status.counters
                # Some were taken, and their trainer died before it could say so.
                assert 0 < counters.num_duplicate < counters.num_sent
                assert counters.num_invalid == counters.num_dropped == 0
            await trainer.stop()
            assert_each_once(trainer.kept(), 150)

    run(scenario(), 120)
    spool.close()


def test_a_trainer_that_hangs_is_left_after_the_time_a_batch_may_take(tmp_path: Path, drafter: Path) -> None:
    """SIGSTOP: the kernel still accepts bytes, and nothing answers."""
    spool = open_spool(tmp_path / "spool")

    async def scenario() -> None:
        async with trainer_process(tmp_path, drafter, keeps_trajectories=True) as trainer:
            await trainer.start()
            assert trainer._process is not None
            async with uploading(trainer.address, spool, timeout_s=0.5) as uploader:
                assert spool.take(trajectory(0))
                await eventually(lambda: uploader.status.position == spool.end)
                trainer._process.send_signal(signal.SIGSTOP)
                assert spool.take(trajectory(1))
                await eventually(lambda: "DEADLINE_EXCEEDED" in str(uploader.status.last_error))
                trainer._process.send_signal(signal.SIGCONT)
                await eventually(lambda: uploader.status.position == spool.end)
            await trainer.stop()
            assert_each_once(trainer.kept(), 2)

    run(scenario(), 60)
    spool.close()


def test_a_server_killed_at_any_moment_delivers_each_exactly_once(tmp_path: Path, drafter: Path) -> None:
    rng = random.Random(5)

    async def scenario() -> None:
        async with trainer_process(tmp_path, drafter, keeps_trajectories=True) as trainer:
            await trainer.start()
            first = 0
            for _ in range(5):
                arguments = (trainer.address, str(tmp_path / "spool"), str(first), str(first + 1000))
                process = await start_module("tests.run_uploader", *arguments)
                with contextlib.closing(process._transport):  # type: ignore[attr-defined]
                    assert await line_of(process) == "ready"
                    await asyncio.sleep(rng.uniform(0.05, 0.4))
                    process.kill()
                    await process.wait()
                # What the dead process wrote, delivered or not, is named up to here; the next one goes on behind it.
                spool = open_spool(tmp_path / "spool")
                records = spool.read(START, 10**6)
                first = max([first, *(int(record.trajectory.request_id[1:]) + 1 for record in records)])
                spool.close()
            process = await start_module("tests.run_uploader", trainer.address, str(tmp_path / "spool"), "0", "0")
            with contextlib.closing(process._transport):  # type: ignore[attr-defined]
                assert [await line_of(process), await line_of(process)] == ["ready", "done"]
                await process.wait()
            await trainer.stop()
            assert first > 20, "something was written before each death"
            assert_each_once(trainer.kept(), first)

    run(scenario(), 120)


def test_a_trainer_whose_disk_is_full_gets_them_when_it_has_room(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, kept = open_spool(tmp_path / "spool"), open_spool(tmp_path / "kept")
    append = Segment.append
    room = 9

    def bounded(self: Segment, payload: list[Buffer]) -> None:
        nonlocal room
        if self.path.parent == kept.directory:
            if not room:
                raise OSError(28, "No space left on device")
            room -= 1
        append(self, payload)

    async def scenario() -> None:
        nonlocal room
        async with training(tmp_path / "store", drafter, kept) as trainer:  # type: ignore[arg-type]
            assert all(spool.take(trajectory(index)) for index in range(30))
            monkeypatch.setattr(Segment, "append", bounded)
            async with uploading(trainer.server.address, spool) as uploader:
                await eventually(lambda: uploader.status.counters.num_dropped > 10)
                assert len(kept.read(START, 100)) == 9
                room = 1000
                await eventually(lambda: uploader.status.position == spool.end)
                assert uploader.status.last_error is None

    run(scenario(), 60)
    assert_each_once([record.trajectory.request_id for record in kept.read(START, 100)], 30)
    spool.close()
    kept.close()


def test_a_trainer_that_stays_away_costs_the_oldest_of_a_full_spool_and_nothing_else(
    tmp_path: Path, drafter: Path
) -> None:
    spool = TrajectorySpool(tmp_path / "spool", 8000, 1e9, 2000)

    async def scenario() -> None:
        async with uploading("127.0.0.1:1", spool) as uploader:
            await eventually(lambda: uploader.status.state == "reading")
            for index in range(200):
                assert await asyncio.to_thread(spool.take, trajectory(index))
            await eventually(lambda: "UNAVAILABLE" in str(uploader.status.last_error))
        left = [record.trajectory.request_id for record in spool.read(START, 1000)]
        assert spool.counters.dropped_bytes == 200 - len(left) > 0
        async with training(tmp_path / "store", drafter) as trainer:
            async with uploading(trainer.server.address, spool) as uploader:
                await eventually(lambda: uploader.status.position == spool.end)
            assert [taken.request_id for taken in trainer.sink.trajectories] == left

    run(scenario(), 60)
    assert spool.counters.num_corrupt == 0
    spool.close()
