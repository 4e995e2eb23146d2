# SPDX-License-Identifier: Apache-2.0
"""A trainer's process that a test kills and restarts; see `tests.serve_trainer`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from adaflash.training.trajectories import START
from tests.uploads import open_spool

ROOT = Path(__file__).resolve().parents[1]


class TrainerProcess:
    """Restarted on the same port with the same folders after each death.

    Args:
        folder: Where its store and its log are.
        drafter: What its versions are made from.
        keeps_trajectories: Whether it takes trajectories.
    """

    def __init__(self, folder: Path, drafter: Path, keeps_trajectories: bool = False) -> None:
        self.root, self.log, self.address = folder / "store", folder / "chunks", ""
        self.spool_folder = folder / "kept"
        self._settings: dict[str, Any] = {"root": str(self.root), "drafter": str(drafter), "port": 0}
        self._settings |= {"log": str(self.log)}
        if keeps_trajectories:
            self._settings["spool"] = str(self.spool_folder)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, die: str | None = None, num_chunks: int = 0) -> None:
        """Start it, to die where `die` says, at the `num_chunks`-th chunk or trajectory."""
        settings = self._settings | {"die": die, "num_chunks": num_chunks}
        self._process = await start_module("tests.serve_trainer", json.dumps(settings))
        self.address = (await line_of(self._process)).removeprefix("ready address=")
        self._settings["port"] = int(self.address.rpartition(":")[2])

    async def publish(self, seed: int) -> int | None:
        """Publish and return the version; None when the trainer died of it."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"publish {seed} key-{seed}\n".encode())
        line = await line_of(self._process)
        return int(line.split()[1]) if line else None

    async def has_died(self) -> None:
        assert self._process is not None
        assert await asyncio.wait_for(self._process.wait(), 30) == -signal.SIGKILL

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def num_sent(self, version: int) -> dict[str, int]:
        """Bytes sent of each file of a version, over all processes; what was about to be sent counts."""
        sent: dict[str, int] = defaultdict(int)
        for line in self.log.read_text().splitlines():
            of, file, _, num_bytes = line.split()
            sent[file] += int(num_bytes) if int(of) == version else 0
        return sent

    def kept(self) -> list[str]:
        """Names of the trajectories on the trainer's disk; the trainer must be dead."""
        spool = open_spool(self.spool_folder)
        names = [record.trajectory.request_id for record in spool.read(START, 10**6)]
        spool.close()
        return names


async def start_module(module: str, *arguments: str) -> asyncio.subprocess.Process:
    """Run a module of the tests in a process of its own, with pipes."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=ROOT, stdin=pipe, stdout=pipe
    )


async def line_of(process: asyncio.subprocess.Process) -> str:
    """Return the next line it prints, empty when it has ended."""
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


@asynccontextmanager
async def trainer_process(
    folder: Path, drafter: Path, keeps_trajectories: bool = False
) -> AsyncIterator[TrainerProcess]:
    """Yield a trainer that is not started yet, and end it."""
    trainer = TrainerProcess(folder, drafter, keeps_trajectories)
    try:
        yield trainer
    finally:
        await trainer.stop()
