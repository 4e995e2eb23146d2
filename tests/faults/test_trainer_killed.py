# SPDX-License-Identifier: Apache-2.0
"""Trainers and servers die, as by `kill -9`, at every state of a delivery; what was on its way goes on from there."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from adaflash.rpc import trainer_service
from adaflash.rpc.version_fetch import ClientTimeouts
from tests.serving import eventually, run
from tests.trainer_process import TrainerProcess, start_module, trainer_process
from tests.trainers import CHUNK_BYTES, Client, client_of, training
from tests.versions import tiny_drafter

MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("tiny"))


def _num_resent(trainer: TrainerProcess, client: Client, version: int) -> int:
    staged = next(staged for staged in client.taken if staged.version == version)
    size = sum(path.stat().st_size for path in staged.directory.iterdir())
    return sum(trainer.num_sent(version).values()) - size


def test_a_trainer_killed_at_any_chunk_has_at_most_that_chunk_sent_again(tmp_path: Path, drafter: Path) -> None:
    rng = random.Random(20261130)
    deaths = [("before_chunk", 1), ("after_chunk", 1)]
    deaths += [(rng.choice(["before_chunk", "after_chunk"]), rng.randint(1, 4)) for _ in range(5)]

    async def scenario() -> None:
        async with trainer_process(tmp_path, drafter) as trainer:
            await trainer.start()
            assert await trainer.publish(1) == 1
            await trainer.stop()
            async with client_of(trainer.address, tmp_path / "staging", drafter) as client:
                for number, (die, num_chunks) in enumerate(deaths, 1):
                    await trainer.start(die, num_chunks)
                    await trainer.has_died()
                    received = client.client.status.num_bytes_received
                    sent = sum(trainer.num_sent(1).values())
                    assert sent - received <= number * CHUNK_BYTES
                assert client.versions == []
                await trainer.start()
                await client.has(1)
                resent = _num_resent(trainer, client, 1)
                assert 0 < resent <= len(deaths) * CHUNK_BYTES
                assert client.client.status.num_bytes_received == sum(
                    path.stat().st_size for path in client.taken[0].directory.iterdir()
                ), "the client itself never received a byte twice"
                published = trainer.root / "v00000001"
                assert (client.taken[0].directory / MODEL).read_bytes() == (published / MODEL).read_bytes()

    run(scenario(), 120)


def test_a_trainer_killed_between_publishing_and_telling_is_heard_after_its_restart(
    tmp_path: Path, drafter: Path
) -> None:
    async def scenario() -> None:
        async with trainer_process(tmp_path, drafter) as trainer:
            await trainer.start("subscribe")
            async with client_of(trainer.address, tmp_path / "staging", drafter) as client:
                await trainer.has_died()  # before it accepted the subscription
                await trainer.start()
                assert await trainer.publish(1) == 1
                await client.has(1)
                await trainer.stop()
                await trainer.start("publish")
                await eventually(lambda: client.client.status.state == "subscribed")
                assert await trainer.publish(2) is None
                await trainer.has_died()
                assert client.versions == [1]
                await trainer.start()
                await client.has(2)
                assert await trainer.publish(2) == 2, "the key tells that it was published"
                assert await trainer.publish(3) == 3
                await client.has(3)
                assert client.versions == [1, 2, 3]
                for staged in client.taken[-2:]:
                    assert staged.manifest.train_step == staged.version, "no number stands for another version"

    run(scenario(), 120)


def test_random_kills_of_a_trainer_that_keeps_publishing_never_lead_backwards(tmp_path: Path, drafter: Path) -> None:
    rng = random.Random(5)

    async def scenario() -> None:
        async with trainer_process(tmp_path, drafter) as trainer:
            await trainer.start()
            published: list[int] = []
            async with client_of(trainer.address, tmp_path / "staging", drafter) as client:
                for seed in range(1, 7):
                    version = await trainer.publish(seed)
                    assert version is not None
                    published.append(version)
                    await asyncio.sleep(rng.uniform(0, 0.05))
                    await trainer.stop()
                    await trainer.start()
                await client.has(published[-1])
                assert published == sorted(set(published))
                assert client.versions == sorted(set(client.versions))
                assert set(client.versions) <= set(published)

    run(scenario(), 120)


async def _staged(process: asyncio.subprocess.Process) -> tuple[int, int]:
    """Return version and bytes received of the next version that a client's process takes."""
    assert process.stdout is not None
    while (line := (await process.stdout.readline()).decode().split())[0] != "staged":
        pass
    return int(line[1]), int(line[2])


def test_a_killed_server_goes_on_with_what_it_had(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sent = 0
    read = trainer_service._read

    def slow_read(stream: Any, offset: int, num_bytes: int) -> bytes:
        nonlocal num_sent
        time.sleep(0.03)
        num_sent += num_bytes
        return read(stream, offset, num_bytes)

    monkeypatch.setattr(trainer_service, "_read", slow_read)

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1)
            published = trainer.store.get(1)
            size = published.manifest.num_bytes + published.manifest_size
            arguments = (trainer.server.address, str(tmp_path / "staging"), str(drafter))
            for kill_at in (0.3, 0.7):
                process = await start_module("tests.run_version_client", *arguments)
                await eventually(lambda at=kill_at: num_sent > at * size, 30)
                process.kill()
                await process.wait()
            process = await start_module("tests.run_version_client", *arguments)
            with contextlib.closing(process._transport):  # type: ignore[attr-defined]
                version, num_received = await _staged(process)
                process.kill()
                await process.wait()
            assert version == 1
            assert num_received < size / 2, "the third process fetched the rest only"
            assert size <= num_sent <= size + 2 * CHUNK_BYTES
            staged = tmp_path / "staging" / "v00000001" / MODEL
            assert staged.read_bytes() == (published.directory / MODEL).read_bytes()

    run(scenario(), 120)


def test_a_trainer_that_hangs_is_left_after_the_time_a_chunk_may_take(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = trainer_service._read
    hangs = True

    def hanging_read(stream: Any, offset: int, num_bytes: int) -> bytes:
        while hangs and offset >= CHUNK_BYTES:
            time.sleep(0.01)
        return read(stream, offset, num_bytes)

    monkeypatch.setattr(trainer_service, "_read", hanging_read)

    async def scenario() -> None:
        nonlocal hangs
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1)
            timeouts = ClientTimeouts(chunk_s=0.3)
            address = trainer.server.address
            async with client_of(address, tmp_path / "a", drafter, timeouts=timeouts) as client:
                await eventually(lambda: "took too long" in str(client.client.status.last_error))
                hangs = False
                await client.has(1)

    try:
        run(scenario(), 60)
    finally:
        hangs = False


def test_a_stopped_trainer_is_noticed_and_no_state_waits_for_ever(tmp_path: Path, drafter: Path) -> None:
    """SIGSTOP: the kernel still accepts connections, and nothing answers."""

    async def scenario() -> None:
        async with trainer_process(tmp_path, drafter) as trainer:
            await trainer.start()
            await trainer.publish(1)
            assert trainer._process is not None
            trainer._process.send_signal(signal.SIGSTOP)
            timeouts = ClientTimeouts(connect_s=0.3, chunk_s=0.3)
            async with client_of(trainer.address, tmp_path / "a", drafter, timeouts=timeouts) as client:
                await eventually(lambda: "connecting took too long" in str(client.client.status.last_error), 20)
                trainer._process.send_signal(signal.SIGCONT)
                await client.has(1)

    run(scenario(), 60)
