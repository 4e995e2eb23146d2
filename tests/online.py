# SPDX-License-Identifier: Apache-2.0
"""Servers with a tiny model that learn from a trainer, and users who compare every reply with plain decoding's."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from adaflash.config import EngineConfig, OnlineConfig, ServerConfig
from adaflash.engine.async_engine import AsyncEngine
from adaflash.models.digest import target_digest
from adaflash.request import RequestOutput, SamplingParams
from adaflash.rpc.client import GenerateClient
from adaflash.rpc.online import OnlineLearning
from adaflash.rpc.server import GrpcServer
from adaflash.rpc.trainer_server import TrainerServer
from adaflash.training.version_directory import Publication, version_of
from adaflash.training.weight_store import WeightStore
from tests.engines import TinySetup, random_prompts, run_all, tiny_engine
from tests.trainers import ListSink
from tests.versions import Tensors, write_like

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 97
PROMPTS = random_prompts(8, VOCAB, 20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@dataclass
class Trainer:
    """A trainer's service over a store that a test publishes to."""

    server: TrainerServer
    store: WeightStore
    sink: ListSink
    digest: str
    drafter: Path

    def publish(self, seed: int, change: Callable[[Tensors], object] | None = None) -> int:
        return self.store.publish(write_like(self.drafter, seed, change), Publication(self.digest, seed))


@dataclass
class Node:
    """One server and what it learns with.

    Attributes:
        expected: Plain decoding's tokens of each prompt, at least as many as a request asks for.
    """

    engine: AsyncEngine
    online: OnlineLearning
    client: GenerateClient
    expected: list[list[int]]

    @property
    def active(self) -> int:
        assert self.online.manager is not None
        return self.online.manager.active

    def go_live_at_once(self) -> None:
        """Have versions serve without a trial from now on."""
        assert self.online.manager is not None
        self.online.manager.proven = 1 << 40

    async def request(self, index: int, params: SamplingParams = GREEDY) -> RequestOutput:
        """Send a prompt; its reply must have plain decoding's tokens."""
        index %= len(PROMPTS)
        reply = await self.client.generate(PROMPTS[index], params)
        assert reply.outputs[0].token_ids == self.expected[index][: params.max_tokens]
        return reply

    async def traffic(self, until: Callable[[], bool]) -> None:
        """Send requests until the condition holds."""
        numbers = iter(range(2000))

        async def user() -> None:
            while not until():
                await self.request(next(numbers))

        await asyncio.gather(*(user() for _ in range(4)))

    @asynccontextmanager
    async def users(self, count: int = 2, params: SamplingParams = GREEDY) -> AsyncIterator[list[RequestOutput]]:
        """Send requests while the block runs, into which replies come as they end; drafts are verified meanwhile."""
        replies: list[RequestOutput] = []
        numbers, is_over = itertools.count(), False

        async def user() -> None:
            while not is_over:
                replies.append(await self.request(next(numbers), params))

        running = [asyncio.create_task(user()) for _ in range(count)]
        try:
            yield replies
        finally:
            is_over = True
            await asyncio.gather(*running)
        assert sum(reply.speculation.num_verified_tokens for reply in replies) > 0, "speculation ran"


def plain_tokens(setup: TinySetup, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return what plain decoding answers to the prompts."""
    engine = tiny_engine(setup, None, EngineConfig(verify_policy="off", num_kv_blocks=64))
    return [output.outputs[0].token_ids for output in run_all(engine, PROMPTS, params)]


@asynccontextmanager
async def trainer_of(setup: TinySetup, root: Path, sink: ListSink | None = None) -> AsyncIterator[Trainer]:
    """Serve a new store while the block runs."""
    digest, store, sink = target_digest(setup.target), WeightStore(root), sink or ListSink()
    server = TrainerServer(store, sink, digest, ServerConfig(grpc_port=0, max_message_bytes=64 << 20))
    await server.start()
    try:
        yield Trainer(server, store, sink, digest, setup.drafters["random"])
    finally:
        await server.stop()
        store.close()


@asynccontextmanager
async def node_of(
    setup: TinySetup, expected: list[list[int]], address: str, root: Path, **changes: object
) -> AsyncIterator[Node]:
    """Serve the target while the block runs, with an OnlineConfig of `changes`; no KV block is left behind."""
    engine_config = EngineConfig(
        model=str(setup.target),
        draft=str(setup.drafters["random"]),
        device="cpu",
        verify_policy="fixed",
        num_kv_blocks=64,
        max_model_len=96,
        block_size=8,
        max_num_seqs=8,
    )
    online_config = OnlineConfig(
        trainer=address,
        online_dir=str(root),
        canary_fraction=0.5,
        canary_min_requests=4,
        canary_max_requests=6,
        trainer_wait_s=20.0,
    )
    online = OnlineLearning(replace(online_config, **changes), engine_config, root.name)  # type: ignore[arg-type]
    engine = await asyncio.to_thread(AsyncEngine, engine_config, capture=online.capture)
    try:
        await online.start(engine)
        server = GrpcServer(engine, ServerConfig(grpc_port=0))
        await server.start()
        try:
            async with GenerateClient(server.address) as client:
                yield Node(engine, online, client, expected)
        finally:
            await server.stop()
    finally:
        await engine.close()
        await online.close()
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_total_blocks, "a KV block leaked"


@dataclass
class TrainerProcess:
    """`adaflash trainer` in a process of its own, on the same port and folders after each death."""

    setup: TinySetup
    root: Path
    address: str = "127.0.0.1:0"
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "adaflash.cli.main", "trainer", str(self.setup.target)]
        flags = ["--draft", str(self.setup.drafters["random"]), f"--grpc-port={self.address.rpartition(':')[2]}"]
        pace = ["--device=cpu", "--num-threads=1", "--publish-interval-s=0.2", "--min-tokens=1", "--max-epochs=1"]
        folders = [f"--{name}={self.root / name}" for name in ("store", "spool", "state")]
        self.process = await asyncio.create_subprocess_exec(
            *command, *flags, *pace, *folders, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        match = re.fullmatch(r"ready address=(\S+)( .*)?\n", (await self.process.stdout.readline()).decode())
        assert match is not None, "it says when it is ready"
        self.address = match[1]

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def newest(self) -> int:
        """The highest version in the store's folder."""
        return max((version_of(path.name) or 0 for path in (self.root / "store").iterdir()), default=0)


@asynccontextmanager
async def trainer_process(setup: TinySetup, root: Path) -> AsyncIterator[TrainerProcess]:
    trainer = TrainerProcess(setup, root)
    await trainer.start()
    try:
        yield trainer
    finally:
        await trainer.kill()
