# SPDX-License-Identifier: Apache-2.0
"""A trainer in a process of its own, which logs what it sends and dies where it is told to.

Run as `python -m tests.serve_trainer JSON`, with an object of

* `root`, `drafter`, `port`: the store, what its versions are made from, and where to listen (0: anywhere);
* `log`: file that gets a line `VERSION FILE OFFSET NUM_BYTES` for every chunk, before it is sent;
* `spool`: where trajectories are kept; without it none is taken;
* `die`: `subscribe` (when a client subscribes), `before_chunk` or `after_chunk` (the `num_chunks`-th), `publish` (when
  a version is on disk and nobody was told), `before_take` or `after_take` (the `num_chunks`-th trajectory).

Reads lines `publish SEED KEY` and answers each with `published VERSION`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from adaflash.config import ServerConfig
from adaflash.rpc import trainer_service
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.trainer_server import TrainerServer
from adaflash.rpc.trajectory_intake import TrajectorySink
from adaflash.training.trajectories import Trajectory, TrajectorySpool
from adaflash.training.weight_store import WeightStore
from tests.versions import TARGET_DIGEST, publication, write_like

SEGMENT_BYTES = 4000


class NoSink:
    """Takes nothing."""

    def take(self, trajectory: object) -> bool:
        return False

    def record_ids(self) -> tuple[str, ...]:
        return ()


def die() -> None:
    """End as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class DyingSpool(TrajectorySpool):
    """Dies before or after it keeps a trajectory."""

    fate: str | None = None
    left = 0

    def take(self, trajectory: Trajectory) -> bool:
        self.left -= 1
        if self.fate == "before_take" and self.left == 0:
            die()
        is_kept = super().take(trajectory)
        if self.fate == "after_take" and self.left == 0:
            die()
        return is_kept


def sink_of(settings: dict[str, Any]) -> TrajectorySink:
    """Return where trajectories go."""
    if "spool" not in settings:
        return NoSink()
    spool = DyingSpool(Path(settings["spool"]), 1 << 30, 1e9, SEGMENT_BYTES)
    spool.fate, spool.left = settings.get("die"), settings.get("num_chunks", 0)
    return spool


def arm(settings: dict[str, Any], store: WeightStore) -> None:
    """Have the service log its chunks and die as `settings` say."""
    fate, left = settings.get("die"), settings.get("num_chunks", 0)
    log = os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    fetch, write = trainer_service.TrainerService.FetchVersion, trainer_service.write_within
    current = pb.FetchVersionRequest()

    async def logged_fetch(self: Any, request: pb.FetchVersionRequest, context: Any) -> None:
        nonlocal current
        current = request
        await fetch(self, request, context)

    async def logged_write(context: Any, message: Any, timeout_s: float) -> None:
        nonlocal left
        is_chunk = isinstance(message, pb.FileChunk)
        if is_chunk:
            left -= 1
            os.write(log, f"{current.version} {current.file} {message.offset} {len(message.data)}\n".encode())
            if fate == "before_chunk" and left == 0:
                die()
        await write(context, message, timeout_s)
        if is_chunk and fate == "after_chunk" and left == 0:
            die()

    trainer_service.TrainerService.FetchVersion = logged_fetch  # type: ignore[method-assign]
    trainer_service.write_within = logged_write
    if fate == "subscribe":
        store.skip_to = lambda version: die()  # type: ignore[method-assign]
    if fate == "publish":
        store._tell = die  # type: ignore[method-assign]


async def main() -> None:
    """Serve until stdin ends."""
    settings = json.loads(sys.argv[1])
    store = WeightStore(Path(settings["root"]))
    arm(settings, store)
    config = ServerConfig(grpc_port=settings["port"])
    server = TrainerServer(store, sink_of(settings), TARGET_DIGEST, config)
    await server.start()
    sys.stdout.write(f"ready address={server.address}\n")
    sys.stdout.flush()
    while line := await asyncio.to_thread(sys.stdin.readline):
        _, seed, key = line.split()
        write = write_like(Path(settings["drafter"]), int(seed))
        version = await asyncio.to_thread(store.publish, write, publication(int(seed), idempotency_key=key))
        sys.stdout.write(f"published {version}\n")
        sys.stdout.flush()
    await server.drain()


if __name__ == "__main__":
    asyncio.run(main())
