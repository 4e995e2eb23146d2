# SPDX-License-Identifier: Apache-2.0
"""Versions on their way from a trainer to servers, when nothing breaks."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from adaflash.errors import RequestError, WeightError
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.version_fetch import ClientTimeouts
from adaflash.training.staging import StagedVersion
from adaflash.training.version_report import VersionReport
from tests.serving import eventually, run
from tests.trainers import Client, Training, client_of, training
from tests.versions import Tensors, tiny_drafter


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("tiny"))


def assert_same(trainer: Training, staged: StagedVersion) -> None:
    """What arrived is what was published, byte for byte."""
    published = trainer.store.get(staged.version).directory
    for name in ("model.safetensors", "config.json", "manifest.json"):
        assert (staged.directory / name).read_bytes() == (published / name).read_bytes()


async def reports(trainer: Training) -> dict[str, tuple[int, str]]:
    """Return version and event of each server's last report."""
    async with trainer.stub() as stub:
        status = await stub.GetStatus(pb.GetTrainerStatusRequest())
    names = {number: name.removeprefix("VERSION_EVENT_").lower() for name, number in pb.VersionEvent.items()}
    return {report.server_id: (report.version, names[report.event]) for report in status.servers}


async def reported(trainer: Training, expected: dict[str, tuple[int, str]]) -> None:
    for _ in range(500):
        if await reports(trainer) == expected:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(await reports(trainer))


def test_three_servers_get_every_version_and_say_so(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer, AsyncExitStack() as stack:
            trainer.publish(1)
            clients: list[Client] = [
                await stack.enter_async_context(client_of(trainer.server.address, tmp_path / name, drafter, name))
                for name in ("npu-0", "cuda-0", "cpu-0")
            ]
            for version in (1, 2, 3):
                for client in clients:
                    assert_same(trainer, await client.has(version))
                if version < 3:
                    assert await asyncio.to_thread(trainer.publish, version + 1) == version + 1
            assert [client.versions for client in clients] == [[1, 2, 3]] * 3
            await reported(trainer, dict.fromkeys(("npu-0", "cuda-0", "cpu-0"), (3, "staged")))

    run(scenario(), 60)


def test_each_byte_is_fetched_once(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1)
            async with client_of(trainer.server.address, tmp_path / "a", drafter) as client:
                staged = await client.has(1)
                expected = staged.manifest.num_bytes + (staged.directory / "manifest.json").stat().st_size
                assert client.client.status.num_bytes_received == expected

    run(scenario())


def test_a_difference_is_fetched_by_who_has_the_base_and_the_whole_by_who_has_not(
    tmp_path: Path, drafter: Path
) -> None:
    def only_a_little(tensors: Tensors) -> None:
        base = load_file(tmp_path / "store" / "v00000001" / "model.safetensors")
        tensors.update(base)
        tensors["fc.weight"][0, 0] += 1

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1)
            async with client_of(trainer.server.address, tmp_path / "a", drafter) as client:
                await client.has(1)
                before = client.client.status.num_bytes_received
                trainer.publish(2, only_a_little, kind="DELTA", base_version=1)
                staged = await client.has(2)
                assert staged.manifest.kind == "DELTA"
                model_size = staged.manifest.file("model.safetensors").size
                assert client.client.status.num_bytes_received - before < model_size / 4
                assert_same(trainer, staged)
            async with client_of(trainer.server.address, tmp_path / "b", drafter) as other:
                assert_same(trainer, await other.has(2))
                assert other.client.status.num_bytes_received > model_size
            # The base is there, and is not what it was.
            (tmp_path / "a" / "v00000001" / "model.safetensors").write_bytes(b"x")
            trainer.publish(3, only_a_little, kind="DELTA", base_version=1)
            async with client_of(trainer.server.address, tmp_path / "a", drafter) as client:
                assert_same(trainer, await client.has(3))

    run(scenario())


def test_only_the_newest_version_is_fetched_after_a_pause(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            address = trainer.server.address
            trainer.publish(1)
            async with client_of(address, tmp_path / "a", drafter) as client:
                await client.has(1)
            for seed in (2, 3, 4):
                trainer.publish(seed)
            async with client_of(address, tmp_path / "a", drafter) as client:
                await client.has(4)
                assert client.versions == [1, 4], "what is staged comes first, then the newest"

    run(scenario())


def test_a_restarted_server_gets_its_staged_version_without_a_trainer(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            address = trainer.server.address
            for seed in (1, 2, 3):
                trainer.publish(seed)
                async with client_of(address, tmp_path / "a", drafter) as client:
                    await client.has(seed)
        async with client_of(address, tmp_path / "a", drafter) as client:
            await client.has(3)
            client.client.mark_bad(3, "poor")
        async with client_of(address, tmp_path / "a", drafter) as client:
            await client.has(2)
        path = tmp_path / "a" / "v00000002" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        async with client_of(address, tmp_path / "a", drafter) as client:
            assert (await client.has(1)).directory.name == "v00000001"
            assert not path.parent.exists(), "a damaged version is removed"
        async with client_of(address, tmp_path / "a", drafter, active_version=1) as client:
            await eventually(lambda: client.client.status.state == "backing_off")
            assert client.versions == []

    run(scenario())


def test_a_bad_version_is_not_fetched_again_by_anyone(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            address = trainer.server.address
            trainer.publish(1)
            async with (
                client_of(address, tmp_path / "a", drafter, "a") as first,
                client_of(address, tmp_path / "b", drafter, "b") as second,
            ):
                await first.has(1)
                await second.has(1)
                trainer.publish(2)
                await first.has(2)
                await second.has(2)
                await asyncio.to_thread(first.client.mark_bad, 2, "acceptance fell")
                await eventually(lambda: second.bad == [(2, "a: acceptance fell")])
                assert trainer.store.bad == {2: "a: acceptance fell"}
                assert first.bad == [], "who marked it knows"
            async with client_of(address, tmp_path / "c", drafter, "c") as third:
                await third.has(1)
                assert third.versions == [1]
                trainer.publish(3)
                await third.has(3)
                assert third.versions == [1, 3]
            async with client_of(address, tmp_path / "b", drafter, "b") as second:
                await second.has(3)
                assert 2 not in second.versions

    run(scenario())


@pytest.mark.parametrize("error", [WeightError("its probe is not finite"), ZeroDivisionError("a bug")])
def test_a_version_that_is_not_taken_is_refused_and_the_next_is_taken(
    tmp_path: Path, drafter: Path, error: Exception
) -> None:
    def take(staged: StagedVersion) -> None:
        if staged.version == 1:
            raise error

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1)
            async with client_of(trainer.server.address, tmp_path / "a", drafter, "a", take) as client:
                await reported(trainer, {"a": (1, "refused")})
                trainer.publish(2)
                await client.has(2)
                assert client.versions == [2]

    run(scenario())


def test_a_version_that_is_never_taken_does_not_hold_up_the_next(tmp_path: Path, drafter: Path) -> None:
    async def take(staged: StagedVersion) -> None:
        if staged.version == 1:
            await asyncio.sleep(1000)

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1)
            timeouts = ClientTimeouts(handover_s=0.2)
            address = trainer.server.address
            async with client_of(address, tmp_path / "a", drafter, "a", take, timeouts=timeouts) as client:
                await reported(trainer, {"a": (1, "refused")})
                trainer.publish(2)
                await client.has(2)

    run(scenario())


def test_a_report_waits_for_the_trainer(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1)
            port = trainer.server.port
            address = trainer.server.address
        async with client_of(address, tmp_path / "a", drafter, "a") as client:
            client.client.report(VersionReport(1, "staged"))
            client.client.report(VersionReport(1, "activated", acceptance_length=2.25, num_rounds=100))
            await eventually(lambda: client.client.status.last_error is not None)
            async with training(tmp_path / "store", drafter, grpc_port=port) as trainer:
                await reported(trainer, {"a": (1, "activated")})
                assert trainer.store.pins["active"] == 1

    run(scenario())


def test_a_trainer_that_lost_its_store_goes_on_above_what_servers_have_seen(tmp_path: Path, drafter: Path) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            for seed in range(1, 6):
                trainer.publish(seed)
            port = trainer.server.port
            async with client_of(trainer.server.address, tmp_path / "a", drafter) as client:
                await client.has(5)
                await trainer.server.stop()
                async with training(tmp_path / "new store", drafter, grpc_port=port) as other:
                    await eventually(lambda: other.store.next_version > 1)
                    assert other.publish(7) == 6
                    await client.has(6)
                    assert client.versions == [5, 6]

    run(scenario())


@pytest.mark.parametrize("server_id", ["", "x" * 257])
def test_a_client_needs_a_name(tmp_path: Path, drafter: Path, server_id: str) -> None:
    async def scenario() -> None:
        with pytest.raises(RequestError, match="server_id"):
            async with client_of("127.0.0.1:1", tmp_path / "a", drafter, server_id):
                pass

    run(scenario())


def test_what_does_not_fit_is_refused_before_its_weights_are_fetched(tmp_path: Path, drafter: Path) -> None:
    def another_layout(tensors: Any) -> None:
        del tensors["norm.weight"]

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1, another_layout)
            async with client_of(trainer.server.address, tmp_path / "a", drafter, "a") as client:
                await reported(trainer, {"a": (1, "refused")})
                assert client.client.status.num_bytes_received == 0
                trainer.publish(2)
                await client.has(2)

    run(scenario())


def test_a_close_that_comes_just_as_a_version_is_taken_ends_the_client(tmp_path: Path, drafter: Path) -> None:
    closing: list[asyncio.Task[None]] = []

    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1)

            def take(staged: StagedVersion) -> None:
                closing.append(asyncio.create_task(client.client.close()))

            async with client_of(trainer.server.address, tmp_path / "a", drafter, "a", take) as client:
                await eventually(lambda: len(closing) == 1, 20)
                await asyncio.wait_for(closing[0], 5)
                assert client.client.status.state == "stopped"

    run(scenario())
