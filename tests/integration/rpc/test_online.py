# SPDX-License-Identifier: Apache-2.0
"""Servers that learn from one trainer: trajectories to it, versions from it, tried under traffic, and restarts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from adaflash.config import EngineConfig, OnlineConfig
from adaflash.errors import ConfigError
from adaflash.rpc.online import OnlineLearning
from adaflash.rpc.online_metrics import OnlineCollector
from adaflash.rpc.trainer_service import ACTIVE
from adaflash.training.version_directory import Publication
from tests.engines import TinySetup
from tests.online import GREEDY, PROMPTS, Node, Trainer, node_of, plain_tokens, trainer_of
from tests.serving import eventually, run
from tests.versions import write_like

TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("llama")


@pytest.fixture(scope="module")
def expected(setup: TinySetup) -> list[list[int]]:
    return plain_tokens(setup)


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


async def prove_one_and_stage_two(trainer: Trainer, node: Node) -> None:
    trainer.publish(1)
    await node.traffic(lambda: node.active == 1)
    await eventually(lambda: trainer.store.pins.get(ACTIVE) == 1)
    trainer.publish(2)
    await eventually(lambda: node.online.staging.highest == 2, 20.0)


def test_a_server_that_starts_serves_what_is_proven_though_a_newer_version_is_untried(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with trainer_of(setup, tmp_path / "store") as trainer:
            address = trainer.server.address
            async with node_of(setup, expected, address, tmp_path / "a") as node:
                await prove_one_and_stage_two(trainer, node)
            for name in ("a", "fresh"):  # one knows both versions, one none
                async with node_of(setup, expected, address, tmp_path / name) as node:
                    assert node.active == 1
                    assert (await node.request(0)).speculation.drafter_versions == (1,)
                    if name == "fresh":
                        await node.traffic(lambda node=node: node.active == 2)  # type: ignore[misc]

    run(scenario(), TIMEOUT_S)


def test_a_restart_without_the_trainer_serves_what_was_proven(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with (
            trainer_of(setup, tmp_path / "store") as trainer,
            node_of(setup, expected, trainer.server.address, tmp_path / "a") as node,
        ):
            await prove_one_and_stage_two(trainer, node)
        async with node_of(setup, expected, "127.0.0.1:1", tmp_path / "a") as node:
            assert node.active == 1

    run(scenario(), TIMEOUT_S)


def test_a_version_on_trial_outlives_newer_ones_in_the_store(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with (
            trainer_of(setup, tmp_path / "store") as trainer,
            node_of(setup, expected, trainer.server.address, tmp_path / "a") as node,
        ):
            trainer.publish(1)
            await eventually(lambda: 1 in trainer.store.pins.values(), 20.0)
            for seed in range(2, 9):
                trainer.publish(seed)
            assert trainer.store.get(1).version == 1
            await node.traffic(lambda: node.active == 1)
            await eventually(lambda: trainer.store.pins.get(ACTIVE) == 1)
            await node.traffic(lambda: node.active == 8)
            await eventually(lambda: trainer.store.pins.get(ACTIVE) == 8)
            assert set(trainer.store.pins.values()) == {1, 8}, "nothing is on trial any more"

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


def test_metrics_count_trajectories_and_versions(setup: TinySetup, expected: list[list[int]], tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            trainer_of(setup, tmp_path / "store") as trainer,
            node_of(setup, expected, trainer.server.address, tmp_path / "server") as node,
        ):
            collector = OnlineCollector(node.online)
            trainer.publish(1)
            await node.traffic(lambda: node.active == 1)
            await eventually(lambda: _value(collector, "adaflash:trajectories_submitted", result="accepted") >= 8, 20.0)
            assert _value(collector, "adaflash:drafter_versions", state="active") == 1
            assert _value(collector, "adaflash:weight_updates", result="promoted") == 1
            assert _value(collector, "adaflash:weight_updates", result="rolled_back") == 0
            assert _value(collector, "adaflash:trainer_connected") == 1
            assert _value(collector, "adaflash:weight_bytes") > 0
            assert _value(collector, "adaflash:weight_update_seconds") > 0
            assert _value(collector, "adaflash:trajectories_dropped", reason="disk") == 0
            captured = _value(collector, "adaflash:trajectories_captured")
            assert captured >= _value(collector, "adaflash:trajectories_submitted", result="accepted")

    run(scenario(), TIMEOUT_S)


def _value(collector: OnlineCollector, name: str, **labels: str) -> float:
    """The only sample of that name and labels."""
    samples = [sample for metric in collector.collect() if metric.name == name for sample in metric.samples]
    (value,) = (sample.value for sample in samples if sample.labels == labels)
    return value
