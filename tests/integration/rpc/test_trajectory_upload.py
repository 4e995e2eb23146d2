# SPDX-License-Identifier: Apache-2.0
"""Trajectories on their way from a server's spool to a trainer."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaflash.rpc import trajectory_upload
from adaflash.rpc.trajectory_upload import POSITION_FILE, TrajectoryUploader
from adaflash.training.trajectories import START, Position
from tests.serving import run
from tests.trainers import ListSink, Training, training
from tests.uploads import eventually, open_spool, trajectory, uploading
from tests.versions import tiny_drafter


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("tiny"))


def names(trainer: Training) -> list[str]:
    return [taken.request_id for taken in trainer.sink.trajectories]


def expected(*indices: int) -> list[str]:
    return [f"r{index}" for index in indices]


def test_trajectories_arrive_in_order_as_they_come_and_leave_the_spool(tmp_path: Path, drafter: Path) -> None:
    spool = open_spool(tmp_path / "spool")

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            written = [trajectory(index, num_features=index % 3) for index in range(60)]
            assert all(map(spool.take, written[:40]))
            async with uploading(trainer.server.address, spool) as uploader:
                await eventually(lambda: len(trainer.sink.trajectories) == 40)
                for one in written[40:]:
                    assert spool.put(one)
                await eventually(lambda: uploader.status.position == spool.end != START and len(names(trainer)) == 60)
                counters = uploader.status.counters
                assert (counters.num_sent, counters.num_accepted, counters.num_duplicate) == (60, 60, 0)
                assert counters.num_bytes > 60 * 50
                assert uploader.status.last_error is None
            assert uploader.status.state == "stopped"
            assert names(trainer) == expected(*range(60))
            for sent, taken in zip(written, trainer.sink.trajectories, strict=True):
                assert sent.record_id == taken.record_id
                assert (sent.features is None) == (taken.features is None)
                if sent.features is not None and taken.features is not None:
                    assert all(map(np.array_equal, sent.features, taken.features))
            assert len(list((tmp_path / "spool").glob("*.spool"))) == 1

    run(scenario(), 60)
    spool.close()


def test_a_restart_goes_on_behind_what_was_delivered(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            address = trainer.server.address
            for start in range(0, 60, 20):
                spool = open_spool(tmp_path / "spool")
                assert all(spool.take(trajectory(index)) for index in range(start, start + 20))
                async with uploading(address, spool) as uploader:
                    await eventually(lambda u=uploader, s=spool: u.status.position == s.end)
                assert uploader.status.counters.num_sent == 20
                spool.close()
            assert names(trainer) == expected(*range(60))

    run(scenario(), 60)


def test_a_delivery_whose_reply_was_lost_is_sent_again_and_taken_once(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies behind the trainer's reply and before it has written down its position."""
    spool = open_spool(tmp_path / "spool")
    advance = TrajectoryUploader._advance
    stuck, go_on = threading.Event(), threading.Event()

    def hang(self: TrajectoryUploader, position: Position) -> None:
        stuck.set()
        go_on.wait(20)

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            assert all(spool.take(trajectory(index)) for index in range(20))
            monkeypatch.setattr(TrajectoryUploader, "_advance", hang)
            async with uploading(trainer.server.address, spool):
                await eventually(stuck.is_set)
                num_first = len(names(trainer))
                assert 0 < num_first < 20
            go_on.set()
            monkeypatch.setattr(TrajectoryUploader, "_advance", advance)
            async with uploading(trainer.server.address, spool) as uploader:
                await eventually(lambda: uploader.status.position == spool.end)
                assert uploader.status.counters.num_duplicate == num_first, "one batch at most"
            assert names(trainer) == expected(*range(20))

    run(scenario(), 60)
    spool.close()


def test_those_of_another_target_are_counted_and_left_behind(tmp_path: Path, drafter: Path) -> None:
    spool = open_spool(tmp_path / "spool")

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            for index in range(30):
                assert spool.take(trajectory(index, **({"target_digest": "other"} if index < 25 else {})))
            async with uploading(trainer.server.address, spool) as uploader:
                await eventually(lambda: uploader.status.position == spool.end)
                counters = uploader.status.counters
                assert (counters.num_sent, counters.num_invalid, counters.num_accepted) == (30, 25, 5)
                for index in range(30, 40):
                    assert spool.take(trajectory(index, target_digest="other"))
                await eventually(lambda: counters.num_invalid == 35)
                assert "the trainer refuses trajectories: target_digest='other'" in str(uploader.status.last_error)
                assert counters.num_sent == 40, "none is sent twice"
            assert names(trainer) == expected(*range(25, 30))

    run(scenario(), 60)
    spool.close()


def test_one_that_is_too_large_for_the_trainer_does_not_keep_back_the_others(tmp_path: Path, drafter: Path) -> None:
    spool = open_spool(tmp_path / "spool")

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter, max_message_bytes=100_000) as trainer:
            for index in range(20):
                assert spool.take(trajectory(index, num_features=9000 if index == 9 else 0))
            async with uploading(trainer.server.address, spool, max_batch_bytes=1 << 20) as uploader:
                await eventually(lambda: uploader.status.position == spool.end)
                assert uploader.status.counters.num_invalid == 1
            assert sorted(names(trainer)) == sorted(expected(*range(9), *range(10, 20)))

    run(scenario(), 60)
    spool.close()


def test_one_that_cannot_be_encoded_is_left_behind(tmp_path: Path, drafter: Path) -> None:
    spool = open_spool(tmp_path / "spool")

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            assert all(spool.take(trajectory(index, token_ids=[1, 2**40, 3])) for index in range(3))
            assert spool.take(trajectory(3))
            async with uploading(trainer.server.address, spool, max_batch_bytes=1) as uploader:
                await eventually(lambda: names(trainer) == ["r3"])
                assert uploader.status.counters.num_invalid == 3

    run(scenario(), 60)
    spool.close()


def test_what_the_trainer_cannot_take_waits_and_arrives_later(tmp_path: Path, drafter: Path) -> None:
    spool = open_spool(tmp_path / "spool")

    async def scenario() -> None:
        sink = ListSink(capacity=7)
        async with training(tmp_path / "store", drafter, sink) as trainer:
            assert all(spool.take(trajectory(index)) for index in range(20))
            async with uploading(trainer.server.address, spool) as uploader:
                await eventually(lambda: uploader.status.counters.num_dropped > 5)
                assert "cannot take" in str(uploader.status.last_error)
                assert uploader.status.position < spool.end
                sink.capacity = 100
                await eventually(lambda: uploader.status.position == spool.end)
                assert uploader.status.last_error is None
            assert sorted(names(trainer)) == sorted(expected(*range(20)))

    run(scenario(), 60)
    spool.close()


def test_a_wrong_token_loses_nothing(tmp_path: Path, drafter: Path) -> None:
    spool = open_spool(tmp_path / "spool")

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter, api_key="right") as trainer:
            assert all(spool.take(trajectory(index)) for index in range(5))
            async with uploading(trainer.server.address, spool, token="wrong") as uploader:
                await eventually(lambda: "UNAUTHENTICATED" in str(uploader.status.last_error))
            async with uploading(trainer.server.address, spool, token="right"):
                await eventually(lambda: names(trainer) == expected(*range(5)))

    run(scenario(), 60)
    spool.close()


@pytest.mark.parametrize(
    ("saved", "first"),
    [
        (None, 0),
        (b"", 0),
        (b"[]", 0),
        (b'{"segment": 1}', 0),
        (b'{"segment": true, "offset": 0}', 0),
        (json.dumps({"segment": 999, "offset": 50}).encode(), 0),  # of a spool that was emptied since
        (json.dumps({"segment": 1, "offset": 1 << 40}).encode(), 5),  # of a segment whose end was cut off
    ],
)
def test_a_position_that_cannot_be_right_is_mended(
    tmp_path: Path, drafter: Path, saved: bytes | None, first: int
) -> None:
    spool = open_spool(tmp_path / "spool")
    assert all(spool.take(trajectory(index)) for index in range(5))
    assert spool.end.segment == 1
    if saved is not None:
        (tmp_path / "spool" / POSITION_FILE).write_bytes(saved)

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            async with uploading(trainer.server.address, spool) as uploader:
                assert spool.take(trajectory(5))
                await eventually(lambda: uploader.status.position == spool.end)
            assert names(trainer) == expected(*range(first, 6))

    run(scenario(), 60)
    spool.close()


def test_a_position_that_cannot_be_saved_stops_nothing(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    spool = open_spool(tmp_path / "spool")

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trajectory_upload, "replace_file", full)

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            assert all(spool.take(trajectory(index)) for index in range(20))
            async with uploading(trainer.server.address, spool) as uploader:
                await eventually(lambda: uploader.status.position == spool.end)
            assert names(trainer) == expected(*range(20))

    run(scenario(), 60)
    spool.close()
    assert "a restart would send trajectories again" in caplog.text


def test_a_fault_of_its_own_is_logged_and_it_goes_on(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    spool = open_spool(tmp_path / "spool")
    read = spool.read
    faults = [RuntimeError("one"), OSError("two")]

    def faulty(*args: Any) -> Any:
        if faults:
            raise faults.pop()
        return read(*args)

    monkeypatch.setattr(spool, "read", faulty)

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            assert spool.take(trajectory(0))
            async with uploading(trainer.server.address, spool):
                await eventually(lambda: names(trainer) == ["r0"])

    run(scenario(), 60)
    spool.close()
    assert caplog.text.count("the trajectory uploader failed, and goes on") == 2


def test_the_event_loop_is_free_while_large_trajectories_are_sent(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, encoding and acknowledging happen in threads."""
    spool = open_spool(tmp_path / "spool")
    threads: set[str] = set()
    encode = TrajectoryUploader._encode

    def observed(self: TrajectoryUploader, record: Any) -> bytes | None:
        threads.add(threading.current_thread().name)
        return encode(self, record)

    monkeypatch.setattr(TrajectoryUploader, "_encode", observed)

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter, max_message_bytes=1 << 26) as trainer:
            assert all(spool.take(trajectory(index, num_features=200_000)) for index in range(3))
            async with uploading(trainer.server.address, spool):
                await eventually(lambda: len(names(trainer)) == 3)

    run(scenario(), 60)
    spool.close()
    assert threads
    assert threading.main_thread().name not in threads


def test_closing_while_it_waits_for_a_trainer_is_quick(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "spool")
    assert spool.take(trajectory(0))

    async def scenario() -> None:
        uploader_context = uploading("127.0.0.1:1", spool)
        async with uploader_context as uploader:
            await eventually(lambda: "UNAVAILABLE" in str(uploader.status.last_error))
            started = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - started < 2

    run(scenario(), 60)
    spool.close()
