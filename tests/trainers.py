# SPDX-License-Identifier: Apache-2.0
"""Starts a trainer's server on a free loopback port, and clients of it that take what they are handed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from adaflash.config import ServerConfig
from adaflash.rpc.pb import trainer_pb2_grpc
from adaflash.rpc.trainer_server import TrainerServer
from adaflash.rpc.version_client import RetryPolicy, TrainerAddress, VersionClient
from adaflash.rpc.version_fetch import ClientTimeouts
from adaflash.training.drafter_layout import DrafterLayout
from adaflash.training.payload import PayloadChecker
from adaflash.training.staging import StagedVersion, StagingArea
from adaflash.training.trajectories import Trajectory
from adaflash.training.weight_store import WeightStore
from tests.serving import eventually
from tests.versions import TARGET_DIGEST, Tensors, publication, write_like

CHUNK_BYTES = 8192
FAST = RetryPolicy(initial_s=0.02, max_s=0.1)


@dataclass
class ListSink:
    """Keeps the first `capacity` trajectories."""

    capacity: int = 1_000_000
    trajectories: list[Trajectory] = field(default_factory=list)

    def take(self, trajectory: Trajectory) -> bool:
        if len(self.trajectories) >= self.capacity:
            return False
        self.trajectories.append(trajectory)
        return True

    def record_ids(self) -> list[str]:
        return [trajectory.record_id for trajectory in self.trajectories]


@dataclass
class Training:
    """A running trainer's server and what is around it."""

    server: TrainerServer
    store: WeightStore
    sink: ListSink
    drafter: Path

    def publish(self, seed: int, change: Callable[[Tensors], object] | None = None, **fields: Any) -> int:
        return self.store.publish(write_like(self.drafter, seed, change), publication(**fields))

    @asynccontextmanager
    async def stub(self, token: str | None = None) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(self.server.address) as channel:
            yield trainer_pb2_grpc.TrainerStub(channel)  # type: ignore[no-untyped-call]


@asynccontextmanager
async def training(
    root: Path, drafter: Path, sink: ListSink | None = None, keep: int = 4, **config: Any
) -> AsyncIterator[Training]:
    """Serve the store in `root` with a ServerConfig of `config` while the block runs."""
    sink = sink or ListSink()
    store = WeightStore(root, keep=keep)
    server = TrainerServer(store, sink, TARGET_DIGEST, ServerConfig(**{"grpc_port": 0, **config}))
    await server.start()
    try:
        yield Training(server, store, sink, drafter)
    finally:
        await server.stop()
        store.close()


@dataclass
class Client:
    """A client of a trainer, the versions it was handed, and the bad marks it heard of."""

    client: VersionClient
    staging: StagingArea
    taken: list[StagedVersion]
    bad: list[tuple[int, str]]

    @property
    def versions(self) -> list[int]:
        return [staged.version for staged in self.taken]

    async def has(self, version: int, timeout_s: float = 20.0) -> StagedVersion:
        await eventually(lambda: version in self.versions, timeout_s)
        return next(staged for staged in self.taken if staged.version == version)


@asynccontextmanager
async def client_of(
    address: str,
    root: Path,
    drafter: Path,
    server_id: str = "server-1",
    on_version: Callable[[StagedVersion], object] | None = None,
    token: str | None = None,
    **settings: Any,
) -> AsyncIterator[Client]:
    """Run a client with its staging area in `root` while the block runs; `on_version` is called before it is noted."""
    taken: list[StagedVersion] = []
    bad: list[tuple[int, str]] = []

    async def take(staged: StagedVersion) -> None:
        result = None if on_version is None else on_version(staged)
        if asyncio.iscoroutine(result):
            await result
        taken.append(staged)

    async def note_bad(version: int, reason: str) -> None:
        bad.append((version, reason))

    staging = StagingArea(root)
    tls = settings.pop("tls", None)
    settings = {"retry": FAST, "chunk_bytes": CHUNK_BYTES, "timeouts": ClientTimeouts(connect_s=5), **settings}
    checker = PayloadChecker(DrafterLayout.of(drafter), TARGET_DIGEST)
    client = VersionClient(
        TrainerAddress(address, token, tls), server_id, staging, checker, take, on_bad=note_bad, **settings
    )
    try:
        async with client:
            yield Client(client, staging, taken, bad)
    finally:
        staging.close()
