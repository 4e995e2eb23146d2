# SPDX-License-Identifier: Apache-2.0
"""Versions brought into a serving engine: tried, promoted, rolled back, revoked, and never a token changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from adaflash.config import EngineConfig
from adaflash.engine.async_engine import AsyncEngine
from adaflash.engine.version_manager import LAST_GOOD, RolloutConfig, VersionManager
from adaflash.request import RequestOutput, SamplingParams
from adaflash.training.canary import CanaryConfig
from adaflash.training.staging import StagedVersion, StagingArea
from adaflash.training.version_directory import write_manifest
from adaflash.training.version_report import VersionReport
from tests.engines import TinySetup, oracle_engine, random_prompts, run_all, tiny_engine
from tests.serving import eventually, run
from tests.versions import Tensors, publication, write_like

VOCAB = 97
PROMPTS = random_prompts(12, VOCAB, 20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
CONFIG = EngineConfig(verify_policy="fixed", max_num_seqs=8, num_kv_blocks=64, max_model_len=96, block_size=8)
CANARY = CanaryConfig(fraction=0.5, min_requests=6, max_requests=60)


@dataclass
class Reporter:
    reports: list[VersionReport] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)

    def report(self, report: VersionReport) -> None:
        self.reports.append(report)

    def mark_bad(self, version: int, reason: str) -> None:
        self.bad[version] = reason

    def events(self, version: int) -> list[str]:
        return [report.event for report in self.reports if report.version == version]


@dataclass
class Bench:
    """An engine whose version v drafts rightly with a probability of its own, and what brings versions in."""

    engine: AsyncEngine
    manager: VersionManager
    staging: StagingArea
    reporter: Reporter
    setup: TinySetup
    expected: list[list[int]]
    num_started: int = 0

    def stage(self, version: int, change: Callable[[Tensors], object] | None = None) -> StagedVersion:
        incoming = self.staging.incoming(version, "f" * 64)
        write_like(self.setup.drafters["random"], version, change)(incoming)
        return self.staging.commit(incoming, write_manifest(incoming, version, publication(), None).manifest)

    async def offer(self, version: int, change: Callable[[Tensors], object] | None = None) -> None:
        await self.manager.take(self.stage(version, change))

    async def request(self, params: SamplingParams = GREEDY) -> RequestOutput:
        """Run a request and check its tokens against plain decoding's."""
        index = self.num_started % len(PROMPTS)
        self.num_started += 1
        tokens: list[int] = []
        async for delta in self.engine.generate(PROMPTS[index], params):
            tokens += delta.outputs[0].token_ids
        assert tokens == self.expected[index]
        return delta

    async def traffic(self, until: Callable[[], bool], concurrency: int = 6, limit: int = 600) -> list[RequestOutput]:
        """Send requests until the condition holds."""
        outputs: list[RequestOutput] = []

        async def user() -> None:
            while not until():
                outputs.append(await self.request())
                assert len(outputs) < limit, "the condition never came true"

        await asyncio.gather(*(user() for _ in range(concurrency)))
        return outputs

    async def resident(self) -> list[int]:
        return await self.engine.call(lambda engine: engine.rollout.drafters.versions)


@pytest.fixture(scope="module")
def setup(tiny_setup: Callable[[str], TinySetup]) -> TinySetup:
    return tiny_setup("llama")


@pytest.fixture(scope="module")
def expected(setup: TinySetup) -> list[list[int]]:
    outputs = run_all(tiny_engine(setup, None, EngineConfig(verify_policy="off", num_kv_blocks=64)), PROMPTS, GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


@asynccontextmanager
async def bench(
    setup: TinySetup,
    expected: list[list[int]],
    root: Path,
    accuracy_of: dict[int, float],
    config: RolloutConfig | None = None,
    proven: int = 0,
) -> AsyncIterator[Bench]:
    continuations = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    engine = AsyncEngine(CONFIG, engine=oracle_engine(setup, continuations, 0.5, CONFIG, accuracy_of))
    staging = StagingArea(root)
    manager = VersionManager(engine, setup.drafters["random"], staging, config or RolloutConfig(CANARY))
    manager.proven = max(manager.proven, proven)
    reporter = Reporter()
    manager.start(reporter)
    try:
        yield Bench(engine, manager, staging, reporter, setup, expected)
    finally:
        await manager.close()
        await engine.close()
        staging.close()


def test_a_better_version_is_promoted_and_serves_alone(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(setup, expected, tmp_path, {1: 0.8}) as b:
            await b.offer(1)
            outputs = await b.traffic(lambda: b.manager.active == 1)
            assert {o.speculation.drafter_versions for o in outputs} == {(0,), (1,)}
            assert b.reporter.events(1) == ["canary", "activated"]
            activated = b.reporter.reports[-1]
            assert activated.acceptance_length > 1.5
            assert activated.num_rounds > 0
            assert b.staging.pinned(LAST_GOOD) == 1
            assert (await b.request()).speculation.drafter_versions == (1,)
            assert await b.resident() == [1]
            assert b.manager.versions_by_state() == {"active": 1}

    run(scenario(), 60)


def test_a_useless_version_is_rolled_back_within_2000_drafts(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(setup, expected, tmp_path, {1: 0.0, 2: 0.9}, RolloutConfig(CanaryConfig())) as b:
            await b.offer(1)
            outputs = await b.traffic(lambda: 1 in b.reporter.bad)
            assert "acceptance length 1.0" in b.reporter.bad[1]
            assert b.reporter.events(1) == ["canary", "rolled_back"]
            assert b.reporter.reports[-1].num_rounds <= 2000
            assert {v for o in outputs for v in o.speculation.drafter_versions} == {0, 1}
            assert await b.resident() == [0]
            assert (b.manager.active, b.manager.counters.num_rolled_back) == (0, 1)
            await b.offer(2)
            await b.traffic(lambda: b.reporter.events(2)[-1:] == ["activated"])

    run(scenario(), 60)


def test_a_version_that_passed_elsewhere_goes_live_at_once(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(setup, expected, tmp_path, {}, proven=4) as b:
            assert not await b.manager.wait_for(4, 0.05)
            await b.offer(4)
            assert await b.manager.wait_for(4, 10.0)
            assert b.reporter.events(4) == ["activated"]
            assert (await b.request()).speculation.drafter_versions == (4,)

    run(scenario(), 60)


def test_a_version_that_overflows_is_refused_before_it_serves(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    def overflow(tensors: Tensors) -> None:
        tensors["norm.weight"] = np.full_like(tensors["norm.weight"], 3e38)

    async def scenario() -> None:
        async with bench(setup, expected, tmp_path, {}) as b:
            await b.offer(1, overflow)
            await eventually(lambda: b.manager.counters.num_refused == 1)
            assert b.reporter.events(1) == ["refused"]
            assert "not finite" in b.reporter.reports[0].reason
            assert await b.resident() == [0]
            assert (await b.request()).speculation.drafter_versions == (0,)

    run(scenario(), 60)


def test_the_newest_takes_the_place_of_those_that_wait(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(setup, expected, tmp_path, {1: 0.8, 2: 0.8, 3: 0.95}) as b:
            await b.offer(1)
            await eventually(lambda: b.reporter.events(1) == ["canary"])
            await b.offer(2)
            await b.offer(3)
            assert b.manager.versions_by_state() == {"active": 0, "candidate": 1, "pending": 3}
            await b.traffic(lambda: b.manager.active == 3)
            assert b.reporter.events(2) == []
            assert b.reporter.events(3) == ["canary", "activated"]

    run(scenario(), 60)


def test_a_revoked_version_gives_way_to_the_one_before(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(setup, expected, tmp_path, {}, proven=2) as b:
            for version in (1, 2):
                await b.offer(version)
                assert await b.manager.wait_for(version, 10.0)
            running = asyncio.create_task(b.request())
            await eventually(lambda: b.engine.stats().num_running == 1)
            await b.manager.revoke(2, "by hand")
            assert (b.manager.active, await b.resident()) == (1, [1])
            assert (await running).speculation.drafter_versions in {(2,), (2, 1), (1,)}
            assert (await b.request()).speculation.drafter_versions == (1,)
            assert b.staging.pinned(LAST_GOOD) == 1
            b.staging.discard(1)
            await b.manager.revoke(1, "by hand")
            assert (b.manager.active, await b.resident()) == (0, [0])
            assert (await b.request()).speculation.drafter_versions == (0,)
            await b.offer(7)
            await b.traffic(lambda: b.manager.active == 7)

    run(scenario(), 60)


def test_a_revoked_candidate_ends_its_trial(setup: TinySetup, expected: list[list[int]], tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(setup, expected, tmp_path, {}) as b:
            await b.offer(1)
            await eventually(lambda: b.reporter.events(1) == ["canary"])
            await b.manager.revoke(1, "bad elsewhere")
            await eventually(lambda: b.reporter.events(1) == ["canary", "rolled_back"])
            assert await b.resident() == [0]

    run(scenario(), 60)


def test_a_trial_against_a_revoked_version_ends_undecided(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(setup, expected, tmp_path, {}, proven=1) as b:
            await b.offer(1)
            assert await b.manager.wait_for(1, 10.0)
            await b.offer(2)
            await eventually(lambda: b.reporter.events(2) == ["canary"])
            await b.manager.revoke(1, "by hand")
            await eventually(lambda: b.reporter.events(2) == ["canary", "rolled_back"])
            assert 2 not in b.reporter.bad
            assert await b.resident() == [0]

    run(scenario(), 60)


def test_requests_that_take_too_long_are_moved_over(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        rollout = RolloutConfig(CANARY, drain_timeout_s=0.0)
        async with bench(setup, expected, tmp_path, {0: 0.0}, rollout, proven=2) as b:
            running = asyncio.create_task(b.request())
            await eventually(lambda: b.engine.stats().num_running == 1)
            for version in (1, 2):
                await b.offer(version)
                assert await b.manager.wait_for(version, 10.0)
            await running

    run(scenario(), 60)


def test_prompts_in_the_prefix_cache_do_not_starve_a_trial(
    setup: TinySetup, expected: list[list[int]], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(
            setup, expected, tmp_path, {}, RolloutConfig(CanaryConfig(0.5, min_requests=4, max_requests=8))
        ) as b:
            for _ in PROMPTS:
                await b.request()
            assert b.engine.stats().num_cached_tokens == 0
            for version in (1, 2):
                await b.offer(version)
                await b.traffic(lambda version=version: b.manager.active == version, limit=60)  # type: ignore[misc]
            assert b.engine.stats().num_cached_tokens > 0

    run(scenario(), 60)
