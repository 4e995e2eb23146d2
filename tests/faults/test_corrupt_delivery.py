# SPDX-License-Identifier: Apache-2.0
"""Something between a trainer and a server spoils what it passes on, hundreds of times: nothing spoilt is ever used."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaflash.rpc import trainer_service
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.version_client import RetryPolicy
from tests.serving import eventually, run
from tests.trainers import CHUNK_BYTES, Client, client_of, training
from tests.versions import tiny_drafter

NUM_SPOILT = 220
GOOD_EVERY = 20
GIVE_UP_AT_ONCE = RetryPolicy(initial_s=0.01, max_s=0.02, max_attempts=1)

Spoil = Callable[[random.Random, pb.FileChunk], list[pb.FileChunk]]


def _again(chunk: pb.FileChunk, data: bytes, offset: int | None = None) -> pb.FileChunk:
    """Return a chunk whose own checksum is right, whatever it holds."""
    return pb.FileChunk(offset=chunk.offset if offset is None else offset, data=data, crc32=zlib.crc32(data))


def flip_on_the_way(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    data = bytearray(chunk.data)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return [pb.FileChunk(offset=chunk.offset, data=bytes(data), crc32=chunk.crc32)]


def flip_at_the_source(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    data = bytearray(chunk.data)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return [_again(chunk, bytes(data))]


def flip_checksum(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    return [pb.FileChunk(offset=chunk.offset, data=chunk.data, crc32=chunk.crc32 ^ 1 << rng.randrange(32))]


def cut(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    data = chunk.data[: rng.randrange(len(chunk.data))]
    return [pb.FileChunk(offset=chunk.offset, data=data, crc32=chunk.crc32)]


def extend(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    return [_again(chunk, chunk.data + rng.randbytes(rng.randint(1, 5000)))]


def withhold(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    return []


def empty(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    return [_again(chunk, b"")]


def repeat(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    return [chunk, chunk]


def halves_in_the_wrong_order(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    middle = max(1, len(chunk.data) // 2)
    return [_again(chunk, chunk.data[middle:], chunk.offset + middle), _again(chunk, chunk.data[:middle])]


def swapped_halves(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    middle = max(1, len(chunk.data) // 2)
    return [_again(chunk, chunk.data[middle:] + chunk.data[:middle] + b"")]


def wrong_offset(rng: random.Random, chunk: pb.FileChunk) -> list[pb.FileChunk]:
    return [_again(chunk, chunk.data, rng.choice([chunk.offset + 1, 2**63, 2**64 - 1, chunk.offset + CHUNK_BYTES]))]


SPOILS: tuple[Spoil, ...] = (
    flip_on_the_way,
    flip_at_the_source,
    flip_checksum,
    cut,
    extend,
    withhold,
    empty,
    repeat,
    halves_in_the_wrong_order,
    swapped_halves,
    wrong_offset,
)


class Spoiler:
    """Spoils one chunk of each version but the good ones, in a way and at a place chosen at random."""

    def __init__(self) -> None:
        self.rng = random.Random(20261130)
        self.num_spoilt: Counter[str] = Counter()
        self._plans: dict[int, tuple[str, int, Spoil]] = {}

    def plan(self, version: int) -> tuple[str, int, Spoil] | None:
        if version % GOOD_EVERY == 0:
            return None
        if version not in self._plans:
            file = self.rng.choice(["manifest.json", "config.json", *["model.safetensors"] * 4])
            num_chunks = {"model.safetensors": 8}.get(file, 1)
            self._plans[version] = (file, self.rng.randrange(num_chunks), SPOILS[version % len(SPOILS)])
        return self._plans[version]

    def __call__(self, request: pb.FetchVersionRequest, chunk: pb.FileChunk) -> list[pb.FileChunk]:
        plan = self.plan(request.version)
        if plan is None or (request.file, chunk.offset // CHUNK_BYTES) != plan[:2]:
            return [chunk]
        self.num_spoilt[plan[2].__name__] += 1
        return plan[2](self.rng, chunk)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def spoiler(monkeypatch: pytest.MonkeyPatch) -> Spoiler:
    """Put a spoiler into the service, between its files and the network."""
    spoiler = Spoiler()
    fetch = trainer_service.TrainerService.FetchVersion

    class SpoiltContext:
        def __init__(self, request: pb.FetchVersionRequest, context: Any) -> None:
            self._request, self._context = request, context

        async def write(self, chunk: pb.FileChunk) -> None:
            for spoilt in spoiler(self._request, chunk):
                await self._context.write(spoilt)

    async def spoilt_fetch(self: Any, request: pb.FetchVersionRequest, context: Any) -> None:
        await fetch(self, request, SpoiltContext(request, context))

    monkeypatch.setattr(trainer_service.TrainerService, "FetchVersion", spoilt_fetch)
    monkeypatch.setattr("adaflash.training.durable_files.os.fsync", lambda descriptor: None)
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
