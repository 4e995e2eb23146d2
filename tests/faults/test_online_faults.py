# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to versions, trainer, disk or clock: a server under traffic fails no request, changes no token."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from adaflash.request import RequestOutput
from adaflash.rpc.online_metrics import OnlineCollector
from adaflash.rpc.trajectory_upload import TrajectoryUploader
from adaflash.rpc.version_client import VersionClient
from adaflash.speculative.base import Drafter
from adaflash.speculative.resident import ResidentDrafters
from adaflash.training import weight_store
from adaflash.training.spool_segment import Buffer, Segment
from adaflash.training.trajectories import START, TrajectorySpool
from adaflash.training.version_directory import Publication, StoredVersion, write_manifest
from tests.engines import TinySetup
from tests.online import GREEDY, PROMPTS, Node, node_of, plain_tokens, trainer_of, trainer_process
from tests.serving import eventually, run
from tests.spoiling import GIVE_UP_AT_ONCE, SPOILS, Spoil, Spoiler, install
from tests.spoilt_versions import FAULTS, Fault, overflow, write_changed
from tests.trainers import CHUNK_BYTES, FAST, ListSink

LONG = replace(GREEDY, max_tokens=48)
WAIT_S = 40.0  # for what takes a moment; the machine may have other things to do
DAY_S = 86_400.0


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("llama")


@pytest.fixture(scope="module")
def expected(setup: TinySetup) -> list[list[int]]:
    return plain_tokens(setup, LONG)


@pytest.fixture(autouse=True)
def _fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaflash.rpc.online.VersionClient", partial(VersionClient, retry=FAST))
    monkeypatch.setattr("adaflash.rpc.online.TrajectoryUploader", partial(TrajectoryUploader, retry=FAST))


def ids_of(replies: Sequence[RequestOutput]) -> Counter[str]:
    return Counter(reply.request_id for reply in replies)


async def uploaded(node: Node, num_requests: int) -> None:
    """Wait until the trajectories of all requests are written or dropped, and those written have been uploaded."""
    spool, counters = node.online.spool, node.online.spool.counters
    await eventually(
        lambda: counters.num_written + counters.dropped_disk + counters.dropped_full == num_requests, WAIT_S
    )
    await eventually(lambda: spool._acknowledged >= spool.end, WAIT_S)


# ---- spoilt versions ----------------------------------------------------------------------------------------------


NUM_VERSIONS, GOOD_EVERY = 8 * len(FAULTS), 20


def fault_of(version: int) -> Fault | None:
    return FAULTS[version % len(FAULTS)] if version % GOOD_EVERY else None


@pytest.fixture
def spoiler(monkeypatch: pytest.MonkeyPatch) -> Spoiler:
    """Have every version but a few spoilt."""

    def write_spoilt(
        directory: Path, version: int, publication: Publication, base: StoredVersion | None
    ) -> StoredVersion:
        stored, fault = write_manifest(directory, version, publication, base), fault_of(version)
        if fault is None or fault.change is None:
            return stored
        return write_changed(stored, fault.change, fault.lie)

    def spoil_of(version: int) -> Spoil | None:
        fault = fault_of(version)
        return None if fault is None else fault.spoil

    spoiler = Spoiler(spoil_of)
    install(spoiler, monkeypatch)
    monkeypatch.setattr(weight_store, "write_manifest", write_spoilt)
    client = partial(VersionClient, retry=GIVE_UP_AT_ONCE, chunk_bytes=CHUNK_BYTES)
    monkeypatch.setattr("adaflash.rpc.online.VersionClient", client)
    return spoiler


def test_hundreds_of_spoilt_versions_are_refused_under_traffic_and_every_good_one_serves(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path, spoiler: Spoiler
) -> None:
    async def is_refused(node: Node, version: int, fault: Fault) -> None:
        """Wait until a version is refused, before it is staged unless only what it computes is wrong."""
        manager, client, active = node.online.manager, node.online.versions, node.active
        assert manager is not None
        assert client is not None
        num_before = manager.counters.num_refused
        await eventually(lambda: version in client._given_up or manager.counters.num_refused > num_before, WAIT_S)
        assert manager.counters.num_refused - num_before == (fault.change is overflow)
        assert (version in node.online.staging.versions()) == (fault.change is overflow)
        assert node.active == active

    async def scenario() -> None:
        async with (
            trainer_of(setup, tmp_path / "store") as trainer,
            node_of(setup, expected, trainer.server.address, tmp_path / "server") as node,
            node.users() as replies,
        ):
            node.go_live_at_once()
            assert node.online.manager is not None
            num_refused = 0
            for version in range(1, NUM_VERSIONS + 1):
                assert await asyncio.to_thread(trainer.publish, version) == version
                fault = fault_of(version)
                if fault is None:
                    assert await node.online.manager.wait_for(version, WAIT_S)
                    assert (await node.request(version)).speculation.drafter_versions == (version,)
                else:
                    await is_refused(node, version, fault)
                    num_refused += 1
            assert num_refused >= 200
            assert node.online.manager.counters.num_promoted == NUM_VERSIONS // GOOD_EVERY > 10
            used = {version for reply in replies for version in reply.speculation.drafter_versions}
            assert len(used) > 2
            assert all(version % GOOD_EVERY == 0 for version in used)

    run(scenario(), 120)
    assert len(spoiler.num_spoilt) == len(SPOILS)


# ---- many versions ------------------------------------------------------------------------------------------------


async def stamps_of(node: Node, index: int) -> tuple[int, ...]:
    """Stream a reply and return its stamps: in order, and between what was active before and after it."""
    before, tokens, stamps = node.active, list[int](), tuple[int, ...]()
    async for delta in node.client.generate_stream(PROMPTS[index % len(PROMPTS)], LONG):
        tokens += delta.outputs[0].token_ids
        assert delta.speculation.drafter_versions[: len(stamps)] == stamps, "what was stamped stays"
        stamps = delta.speculation.drafter_versions
    assert tokens == node.expected[index % len(PROMPTS)]
    assert list(stamps) == sorted(set(stamps))
    assert before <= stamps[0]
    assert stamps[-1] <= node.active
    return stamps


@pytest.mark.parametrize("drain_timeout_s", [30.0, 0.0], ids=["kept", "moved"])
def test_forty_versions_in_a_row_go_live_under_traffic(
    setup: TinySetup,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drain_timeout_s: float,
) -> None:
    introduce, most_resident = ResidentDrafters.introduce, [0]

    def watched(self: ResidentDrafters, drafter: Drafter, candidate_share: float | None = None) -> None:
        introduce(self, drafter, candidate_share)
        most_resident.append(len(self._drafters))

    monkeypatch.setattr(ResidentDrafters, "introduce", watched)
    replies: list[tuple[int, ...]] = []

    async def scenario() -> None:
        async with (
            trainer_of(setup, tmp_path / "store") as trainer,
            node_of(
                setup, expected, trainer.server.address, tmp_path / "server", drain_timeout_s=drain_timeout_s
            ) as node,
        ):
            node.go_live_at_once()
            assert node.online.manager is not None

            async def user(first: int) -> None:
                while node.active < 40:
                    replies.append(await stamps_of(node, first + len(replies)))

            running = [asyncio.create_task(user(index)) for index in range(4)]
            for version in range(1, 41):
                assert await asyncio.to_thread(trainer.publish, version) == version
                assert await node.online.manager.wait_for(version, WAIT_S)
            await asyncio.gather(*running)
            assert await stamps_of(node, 0) == (40,)
            assert await node.engine.call(lambda engine: engine.rollout.drafters.versions) == [40]
            assert node.engine.stats().num_verified_tokens > 0

    run(scenario(), 120)
    assert max(most_resident) == 2
    assert len(most_resident) == 41
    assert len({version for stamps in replies for version in stamps}) > 10
    assert (max(map(len, replies)) > 1) == (drain_timeout_s == 0.0)


# ---- the trainer dies ---------------------------------------------------------------------------------------------


def test_a_trainer_killed_while_it_learns_is_not_noticed_and_goes_on(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    rng = random.Random(20261130)
    served: list[RequestOutput] = []

    async def scenario() -> None:
        async with (
            trainer_process(setup, tmp_path / "trainer") as trainer,
            node_of(setup, expected, trainer.address, tmp_path / "server") as node,
        ):
            node.go_live_at_once()
            async with node.users() as replies:
                newest = 0
                for _ in range(3):
                    await eventually(lambda newest=newest: node.active > newest, WAIT_S)  # type: ignore[misc]
                    await asyncio.sleep(rng.uniform(0, 0.5))
                    await trainer.kill()
                    newest, num_replies = trainer.newest(), len(replies)
                    assert newest >= node.active
                    await eventually(lambda n=num_replies: len(replies) > n + 10, WAIT_S)  # type: ignore[misc]
                    await trainer.start()
                await eventually(lambda newest=newest: node.active > newest, WAIT_S)  # type: ignore[misc]
            await uploaded(node, len(replies))
            served.extend(replies)
            last = await node.request(0)
            assert last.speculation.drafter_versions[-1] > newest
            served.append(last)
            await uploaded(node, len(served))

    run(scenario(), 240)
    spool = TrajectorySpool(tmp_path / "trainer" / "spool", 1 << 30, 1e9)
    kept = [record.trajectory for record in spool.read(START, 10**6)]
    spool.close()
    assert Counter(trajectory.request_id for trajectory in kept) == ids_of(served), "each arrived once"
    assert all(trajectory.features is not None for trajectory in kept)
    versions = {trajectory.drafter_version for trajectory in kept}
    assert len(versions) > 3


# ---- disk and clock -----------------------------------------------------------------------------------------------


class Disk:
    """The folder of a server's spool, which can be spoilt and mended."""

    def __init__(self, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._spool, self._monkeypatch = spool, monkeypatch
        self._append = Segment.append

    def fill(self) -> None:
        def append(segment: Segment, payload: Sequence[Buffer]) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self._monkeypatch.setattr(Segment, "append", append)

    def remove(self) -> None:
        shutil.rmtree(self._spool)
        self._spool.write_text("no directory, whoever asks")

    def mend(self) -> None:
        self._monkeypatch.setattr(Segment, "append", self._append)
        if self._spool.is_file():
            self._spool.unlink()


@pytest.mark.parametrize("spoil", [Disk.fill, Disk.remove], ids=["full", "unwritable"])
def test_a_spool_that_cannot_be_written_costs_counted_trajectories_only(
    setup: TinySetup,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Disk], None],
) -> None:
    disk = Disk(tmp_path / "server" / "trajectories", monkeypatch)

    async def scenario() -> None:
        async with (
            trainer_of(setup, tmp_path / "store") as trainer,
            node_of(setup, expected, trainer.server.address, tmp_path / "server") as node,
        ):
            arrived, counters = trainer.sink.trajectories, node.online.spool.counters
            async with node.users() as replies:
                await eventually(lambda: len(arrived) >= 5, WAIT_S)
                spoil(disk)
                await eventually(lambda: counters.dropped_disk >= 10, WAIT_S)
                disk.mend()
                num_arrived = len(arrived)
                await eventually(lambda: len(arrived) >= num_arrived + 10, WAIT_S)
            await uploaded(node, len(replies))
            ids = Counter(trajectory.request_id for trajectory in arrived)
            assert set(ids.values()) == {1}
            assert ids.keys() <= ids_of(replies).keys()
            if spoil is Disk.fill:
                assert len(ids) == len(replies) - counters.dropped_disk
            registry = CollectorRegistry()
            registry.register(OnlineCollector(node.online))
            shown = f'adaflash:trajectories_dropped_total{{reason="disk"}} {float(counters.dropped_disk)}'
            assert shown in generate_latest(registry).decode()

    run(scenario(), 150)


@pytest.mark.parametrize("max_age_s", [2.5 * DAY_S, 0.5 * DAY_S], ids=["young enough", "too old"])
def test_a_wall_clock_that_jumps_by_days_loses_only_what_is_too_old(
    setup: TinySetup,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_age_s: float,
) -> None:
    offset_s = [0.0]
    spool = partial(TrajectorySpool, clock=lambda: time.time() + offset_s[0])
    monkeypatch.setattr("adaflash.rpc.online.TrajectorySpool", spool)

    async def scenario() -> None:
        sink = ListSink(capacity=0)  # what comes waits in the server's spool
        async with (
            trainer_of(setup, tmp_path / "store", sink) as trainer,
            node_of(setup, expected, trainer.server.address, tmp_path / "server", trajectory_age_s=max_age_s) as node,
        ):
            counters = node.online.spool.counters
            async with node.users() as replies:
                for jump_s in (0.0, DAY_S, 0.0, -DAY_S, 0.0):
                    offset_s[0] = jump_s
                    num_written = counters.num_written
                    await eventually(lambda n=num_written: counters.num_written >= n + 6, WAIT_S)  # type: ignore[misc]
                sink.capacity = 1_000_000
                for jump_s in (DAY_S, 0.0):
                    num_arrived = len(sink.trajectories)
                    await eventually(lambda n=num_arrived: len(sink.trajectories) >= n + 6, WAIT_S)  # type: ignore[misc]
                    offset_s[0] = jump_s
            await uploaded(node, len(replies))
            num_dropped, num_lost = counters.dropped_age, len(replies) - len(sink.trajectories)
            # What was dropped while it was on its way may have arrived.
            assert 0 <= num_lost <= num_dropped
            assert (num_lost > 0) == (num_dropped > 0) == (max_age_s < DAY_S)
            offset_s[0] = 4 * DAY_S
            await node.request(0)
            await uploaded(node, len(replies) + 1)
            assert counters.dropped_age == num_dropped, "nobody waits for what has been delivered"
            ids = Counter(trajectory.request_id for trajectory in sink.trajectories)
            assert set(ids.values()) == {1}
            assert len(ids) == len(replies) + 1 - num_lost

    run(scenario(), 150)
