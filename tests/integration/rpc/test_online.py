# SPDX-License-Identifier: Apache-2.0
"""Servers that learn from one trainer: trajectories to it, versions from it, tried under traffic, and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from adaflash.config import EngineConfig, OnlineConfig, ServerConfig
from adaflash.engine.async_engine import AsyncEngine
from adaflash.errors import ConfigError
from adaflash.models.digest import target_digest
from adaflash.request import RequestOutput, SamplingParams
from adaflash.rpc.client import GenerateClient
from adaflash.rpc.online import OnlineLearning
from adaflash.rpc.server import GrpcServer
from adaflash.rpc.trainer_server import TrainerServer
from adaflash.rpc.trainer_service import ACTIVE
from adaflash.training.version_directory import Publication
from adaflash.training.weight_store import WeightStore
from tests.engines import TinySetup, random_prompts, run_all, tiny_engine
from tests.serving import eventually, run
from tests.trainers import ListSink
from tests.versions import Tensors, write_like

VOCAB = 97
PROMPTS = random_prompts(8, VOCAB, 20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
TIMEOUT_S = 90.0


@dataclass
class Trainer:
    server: TrainerServer
    store: WeightStore
    sink: ListSink
    digest: str
    drafter: Path

    def publish(self, seed: int, change: Callable[[Tensors], object] | None = None) -> int:
        return self.store.publish(write_like(self.drafter, seed, change), Publication(self.digest, seed))


@dataclass
class Node:
    """One server and what it learns with."""

    engine: AsyncEngine
    online: OnlineLearning
    client: GenerateClient
    expected: list[list[int]]

    @property
    def active(self) -> int:
        assert self.online.manager is not None
        return self.online.manager.active

    async def request(self, index: int, params: SamplingParams = GREEDY) -> RequestOutput:
        """Send a prompt; its reply must have plain decoding's tokens."""
        reply = await self.client.generate(PROMPTS[index % len(PROMPTS)], params)
        assert reply.outputs[0].token_ids == self.expected[index % len(PROMPTS)]
        return reply

    async def traffic(self, until: Callable[[], bool]) -> None:
        numbers = iter(range(2000))

        async def user() -> None:
            while not until():
                await self.request(next(numbers))

        await asyncio.gather(*(user() for _ in range(4)))


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("llama")


@pytest.fixture(scope="module")
def expected(setup: TinySetup) -> list[list[int]]:
    engine = tiny_engine(setup, None, EngineConfig(verify_policy="off", num_kv_blocks=64))
    return [output.outputs[0].token_ids for output in run_all(engine, PROMPTS, GREEDY)]


@asynccontextmanager
async def trainer_of(setup: TinySetup, root: Path) -> AsyncIterator[Trainer]:
    digest, store, sink = target_digest(setup.target), WeightStore(root), ListSink()
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


def test_three_servers_learn_from_one_trainer(setup: TinySetup, expected: list[list[int]], tmp_path: Path) -> None:
    async def scenario() -> None:
        async with trainer_of(setup, tmp_path / "store") as trainer, AsyncExitStack() as stack:
            address = trainer.server.address
            nodes = [
                await stack.enter_async_context(node_of(setup, expected, address, tmp_path / f"server-{i}"))
                for i in range(2)
            ]
            async with node_of(setup, expected, address, tmp_path / "late") as late:
                assert trainer.publish(1) == 1
                for node in (*nodes, late):
                    await node.traffic(lambda node=node: node.active == 1)  # type: ignore[misc]
                assert (await late.request(0)).speculation.drafter_versions == (1,)
            await eventually(lambda: trainer.store.pins.get(ACTIVE) == 1)
            assert trainer.publish(2) == 2
            for node in nodes:
                await node.traffic(lambda node=node: node.active == 2)  # type: ignore[misc]
            await eventually(lambda: trainer.store.pins.get(ACTIVE) == 2)
            # It has caught up before the first request could come.
            async with node_of(setup, expected, address, tmp_path / "late") as late:
                assert late.active == 2
                assert (await late.request(0)).speculation.drafter_versions == (2,)

    run(scenario(), TIMEOUT_S)


def test_trajectories_reach_the_trainer_unless_a_request_forbids_it(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with (
            trainer_of(setup, tmp_path / "store") as trainer,
            node_of(setup, expected, trainer.server.address, tmp_path / "server") as node,
        ):
            await node.request(0)
            await node.request(1, replace(GREEDY, allow_training=False))
            await node.request(2)
            await eventually(lambda: len(trainer.sink.trajectories) == 2, 20.0)
            taken = sorted((t.token_ids for t in trainer.sink.trajectories), key=len)
            assert taken == sorted((PROMPTS[i] + expected[i] for i in (0, 2)), key=len)
            for trajectory in trainer.sink.trajectories:
                assert trajectory.target_digest == trainer.digest
                assert trajectory.features is not None
                assert len(trajectory.features.taps) == len(trajectory.token_ids) - 1

    run(scenario(), TIMEOUT_S)


def test_a_trainer_that_is_not_there_delays_nothing_and_is_found_later(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with trainer_of(setup, tmp_path / "store") as trainer:
            port = trainer.server.port
        async with node_of(setup, expected, f"127.0.0.1:{port}", tmp_path / "server") as node:
            await node.request(0)
            assert node.active == 0

    run(scenario(), TIMEOUT_S)


def test_a_version_marked_bad_is_left_everywhere(setup: TinySetup, expected: list[list[int]], tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            trainer_of(setup, tmp_path / "store") as trainer,
            node_of(setup, expected, trainer.server.address, tmp_path / "a") as one,
            node_of(setup, expected, trainer.server.address, tmp_path / "b") as two,
        ):
            trainer.publish(1)
            for node in (one, two):
                await node.traffic(lambda node=node: node.active == 1)  # type: ignore[misc]
            trainer.store.mark_bad(1, "by hand")
            await eventually(lambda: one.active == two.active == 0, 20.0)
            for node in (one, two):
                assert (await node.request(0)).speculation.drafter_versions == (0,)

    run(scenario(), TIMEOUT_S)


def test_a_version_of_another_target_is_refused_and_serving_goes_on(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with (
            trainer_of(setup, tmp_path / "store") as trainer,
            node_of(setup, expected, trainer.server.address, tmp_path / "a") as node,
        ):
            trainer.store.publish(write_like(trainer.drafter, 1), Publication("another-target", 1))
            trainer.publish(2)
            await node.traffic(lambda: node.active == 2)

    run(scenario(), TIMEOUT_S)


def test_learning_without_a_drafter_is_refused(setup: TinySetup, tmp_path: Path) -> None:
    config = OnlineConfig(trainer="127.0.0.1:1", online_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="give --draft"):
        OnlineLearning(config, EngineConfig(model=str(setup.target), device="cpu"), "server")
