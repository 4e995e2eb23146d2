# SPDX-License-Identifier: Apache-2.0
"""Something between a trainer and a server spoils what it passes on, hundreds of times: nothing spoilt is ever used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from adaflash.rpc.pb import trainer_pb2 as pb
from tests.serving import eventually, run
from tests.spoiling import (
    GIVE_UP_AT_ONCE,
    SPOILS,
    Spoiler,
    cut,
    flip_checksum,
    flip_on_the_way,
    install,
    withhold,
    wrong_offset,
)
from tests.trainers import Client, client_of, training
from tests.versions import tiny_drafter

NUM_SPOILT = 220
GOOD_EVERY = 20


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def spoiler(monkeypatch: pytest.MonkeyPatch) -> Spoiler:
    spoiler = Spoiler(lambda version: SPOILS[version % len(SPOILS)] if version % GOOD_EVERY else None)
    install(spoiler, monkeypatch)
    return spoiler


def test_hundreds_of_spoilt_fetches_are_refused_and_every_good_version_is_taken(
    tmp_path: Path, drafter: Path, spoiler: Spoiler
) -> None:
    async def scenario() -> None:
        async with training(tmp_path / "store", drafter) as trainer:
            address = trainer.server.address
            async with client_of(address, tmp_path / "a", drafter, retry=GIVE_UP_AT_ONCE) as client:
                for version in range(1, NUM_SPOILT + NUM_SPOILT // GOOD_EVERY + 1):
                    assert await asyncio.to_thread(trainer.publish, version) == version
                    if spoiler.plan(version) is None:
                        staged = await client.has(version)
                        published = trainer.store.get(version).directory
                        for name in ("model.safetensors", "config.json"):
                            assert (staged.directory / name).read_bytes() == (published / name).read_bytes()
                    else:
                        await eventually(lambda version=version: version in client.client._given_up, 20)
                good = [version for version in range(1, version + 1) if version % GOOD_EVERY == 0]
                assert client.versions == good

    run(scenario(), 250)
    assert sum(spoiler.num_spoilt.values()) >= 200
    assert len(spoiler.num_spoilt) == len(SPOILS)


def test_a_version_that_arrives_spoilt_once_is_fetched_again(tmp_path: Path, drafter: Path, spoiler: Spoiler) -> None:
    async def has_recovered(client: Client) -> None:
        await client.has(1)
        assert client.versions == [1]

    async def scenario() -> None:
        spoilt_once: set[str] = set()

        def once(request: pb.FetchVersionRequest, chunk: pb.FileChunk) -> list[pb.FileChunk]:
            name = f"{request.file} {chunk.offset}"
            if name in spoilt_once:
                return [chunk]
            spoilt_once.add(name)
            spoil = spoiler.rng.choice([flip_on_the_way, cut, withhold, wrong_offset, flip_checksum])
            return spoil(spoiler.rng, chunk)

        spoiler.__class__.__call__ = lambda self, request, chunk: once(request, chunk)  # type: ignore[method-assign]
        async with training(tmp_path / "store", drafter) as trainer:
            trainer.publish(1)
            async with client_of(trainer.server.address, tmp_path / "a", drafter) as client:
                await has_recovered(client)
                assert len(spoilt_once) > 10, "every chunk of every file came spoilt first"

    original = Spoiler.__call__
    try:
        run(scenario(), 60)
    finally:
        Spoiler.__call__ = original  # type: ignore[method-assign]
