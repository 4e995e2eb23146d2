# SPDX-License-Identifier: Apache-2.0
"""Spoils what a trainer sends of its versions, between the trainer's files and the network."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from adaflash.rpc import trainer_service
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.version_client import RetryPolicy
from tests.trainers import CHUNK_BYTES

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
    """Spoils one chunk of a version, at a place chosen at random.

    Args:
        choose: Says how the chunk of a version is spoilt; None leaves the version as it is.

    Attributes:
        num_spoilt: Chunks by the way in which they were spoilt.
    """

    def __init__(self, choose: Callable[[int], Spoil | None]) -> None:
        self.rng = random.Random(20261130)
        self._choose = choose
        self.num_spoilt: Counter[str] = Counter()
        self._plans: dict[int, tuple[str, int, Spoil]] = {}

    def plan(self, version: int) -> tuple[str, int, Spoil] | None:
        spoil = self._choose(version)
        if spoil is None:
            return None
        if version not in self._plans:
            file = self.rng.choice(["manifest.json", "config.json", *["model.safetensors"] * 4])
            num_chunks = {"model.safetensors": 8}.get(file, 1)
            self._plans[version] = (file, self.rng.randrange(num_chunks), spoil)
        return self._plans[version]

    def __call__(self, request: pb.FetchVersionRequest, chunk: pb.FileChunk) -> list[pb.FileChunk]:
        plan = self.plan(request.version)
        if plan is None or (request.file, chunk.offset // CHUNK_BYTES) != plan[:2]:
            return [chunk]
        self.num_spoilt[plan[2].__name__] += 1
        return plan[2](self.rng, chunk)


def install(spoiler: Spoiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a spoiler into the service; nothing waits for the disk any more."""
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
    monkeypatch.setattr("adaflash.durable_files.os.fsync", lambda descriptor: None)
