# SPDX-License-Identifier: Apache-2.0
"""A session of online learning on one machine: a server, its trainer, and users who send prompts of one domain."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from adaflash.config import EngineConfig, OnlineConfig, ServerConfig
from adaflash.demo.prompts import DomainPrompt
from adaflash.engine.async_engine import AsyncEngine
from adaflash.errors import UnavailableError
from adaflash.request import ChatMessage, SamplingParams
from adaflash.rpc.client import GenerateClient
from adaflash.rpc.online import OnlineLearning
from adaflash.rpc.server import GrpcServer

_START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SessionConfig:
    """What happens in a session.

    Attributes:
        work_dir: Holds everything the server and the trainer keep, and the trainer's log.
        minutes: How long users send prompts while the drafter learns.
        concurrency: Users; each sends its next prompt when the last reply is complete.
        max_tokens: Of each reply.
        publish_interval_s: Seconds between versions.
        trainer_flags: More flags of `adaflash trainer`.
        compare_s: Seconds of each turn when plain and speculative decoding are compared at the end.
        compare_rounds: Turns of each.
        device: Backend of both.
    """

    work_dir: Path
    minutes: float = 10.0
    concurrency: int = 4
    max_tokens: int = 96
    publish_interval_s: float = 20.0
    trainer_flags: tuple[str, ...] = ()
    compare_s: float = 15.0
    compare_rounds: int = 3
    device: str = "auto"


@dataclass(frozen=True)
class ServedRequest:
    """One reply: `started_s` and `finished_s` since the session began; counts as `SpeculationStats` has them."""

    request_id: str
    domain: str
    started_s: float
    finished_s: float
    versions: tuple[int, ...]
    num_output_tokens: int
    num_rounds: int
    num_emitted_tokens: int
    num_verified_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True)
class Throughput:
    """Tokens per second of plain and of speculative decoding, turn by turn.

    `trainer` is `running`, on its own half of the processors, or `paused`, and the server has them all.
    """

    trainer: str
    plain: list[float]
    speculative: list[float]


@dataclass(frozen=True)
class ActiveVersion:
    """A version that became active `active_s` seconds after the session began, the trainer's `train_step` being so.

    `num_trajectories` had ended when it was published.
    """

    version: int
    active_s: float
    train_step: int
    num_trajectories: int


@dataclass
class SessionRecord:
    """What was seen in a session.

    Attributes:
        requests: In the order in which they finished.
        versions: Every version that became active, in order.
        throughput: The comparison at the end.
    """

    requests: list[ServedRequest] = field(default_factory=list)
    versions: list[ActiveVersion] = field(default_factory=list)
    throughput: list[Throughput] = field(default_factory=list)


NextPrompt = Callable[[float], DomainPrompt]
OnProgress = Callable[[SessionRecord, float], None]


async def run_session(config: SessionConfig, next_prompt: NextPrompt, on_progress: OnProgress) -> SessionRecord:
    """Run a session on the embedded model and return what was seen.

    Args:
        config: What happens.
        next_prompt: Called with the seconds since the beginning for each prompt.
        on_progress: Called about once a second with what was seen so far and the seconds since the beginning.

    Raises:
        UnavailableError: The trainer does not start, or ended by itself.
    """
    server_cpus, trainer_cpus = _share_cpus()
    async with _trainer(config, trainer_cpus) as (process, address):
        with _pinned(server_cpus):
            async with _server(config, address, len(server_cpus)) as running:
                session = _Session(config, running, process, next_prompt, on_progress)
                await session.adapt()
                await session.compare("running")
                process.send_signal(signal.SIGSTOP)
                try:
                    await running.engine.call(lambda _: _use_cpus([*server_cpus, *trainer_cpus]))
                    await session.compare("paused")
                finally:
                    process.send_signal(signal.SIGCONT)
                return session.record


@dataclass
class _Running:
    engine: AsyncEngine
    online: OnlineLearning
    client: GenerateClient


class _Session:
    def __init__(
        self,
        config: SessionConfig,
        running: _Running,
        trainer: asyncio.subprocess.Process,
        next_prompt: NextPrompt,
        on_progress: OnProgress,
    ) -> None:
        self.record = SessionRecord()
        self._config, self._running, self._trainer = config, running, trainer
        self._next_prompt, self._on_progress = next_prompt, on_progress
        self._numbers = itertools.count()
        self._started, self._started_at = time.monotonic(), time.time()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._started

    async def adapt(self) -> None:
        """Let users send prompts while the drafter learns."""
        end = 60.0 * self._config.minutes
        watching = asyncio.create_task(self._watch())
        try:
            await self._traffic(lambda: self._now >= end, self.record.requests.append)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if self._trainer.returncode is not None:
            raise UnavailableError(f"the trainer ended with exit code {self._trainer.returncode}; see its log")

    async def compare(self, trainer: str) -> None:
        """Measure plain decoding and what users get by default in turn on the same users."""
        rates: dict[str, list[float]] = {"off": [], "goodput": []}
        await self._running.engine.set_verify_policy("goodput")
        warm = self._now + self._config.compare_s
        await self._traffic(lambda: self._now >= warm, lambda _: None)
        for _ in range(self._config.compare_rounds):
            for policy, results in rates.items():
                await self._running.engine.set_verify_policy(policy)
                before, started = self._running.engine.stats().num_output_tokens, self._now
                end = started + self._config.compare_s
                await self._traffic(lambda end=end: self._now >= end, lambda _: None)  # type: ignore[misc]
                tokens = self._running.engine.stats().num_output_tokens - before
                results.append(tokens / (self._now - started))
        self.record.throughput.append(Throughput(trainer, rates["off"], rates["goodput"]))

    async def _traffic(self, is_over: Callable[[], bool], take: Callable[[ServedRequest], None]) -> None:
        async def user() -> None:
            while not is_over():
                take(await self._request(self._next_prompt(self._now)))

        await asyncio.gather(*(user() for _ in range(self._config.concurrency)))

    async def _request(self, prompt: DomainPrompt) -> ServedRequest:
        request_id, started = f"session-{next(self._numbers)}", self._now
        params = SamplingParams(temperature=0.0, max_tokens=self._config.max_tokens)
        reply = await self._running.client.generate([ChatMessage("user", prompt.prompt)], params, request_id=request_id)
        stats = reply.speculation
        return ServedRequest(
            request_id,
            prompt.domain,
            started,
            self._now,
            stats.drafter_versions,
            reply.usage.num_output_tokens,
            stats.num_rounds,
            stats.num_emitted_tokens,
            stats.num_verified_tokens,
            stats.num_accepted_tokens,
        )

    async def _watch(self) -> None:
        manager = self._running.online.manager
        assert manager is not None, "learning has begun"
        last = 0
        while True:
            if manager.active > last:
                last = manager.active
                self.record.versions.append(self._describe(last))
            self._on_progress(self.record, self._now)
            await asyncio.sleep(1.0)

    def _describe(self, version: int) -> ActiveVersion:
        stored = self._running.online.staging.find(version)
        assert stored is not None, "the active version is staged"
        created = datetime.fromisoformat(stored.manifest.created_at).timestamp() - self._started_at
        num_trajectories = sum(request.finished_s <= created for request in self.record.requests)
        return ActiveVersion(version, self._now, stored.manifest.train_step, num_trajectories)


@asynccontextmanager
async def _server(config: SessionConfig, trainer: str, num_threads: int) -> AsyncIterator[_Running]:
    engine_config = EngineConfig(
        device=config.device,
        max_model_len=1024,
        max_num_seqs=max(8, config.concurrency),
        num_threads=num_threads,
        verify_policy="confidence",  # verifies whatever is promising, so that acceptance can be replayed exactly
    )
    # Few requests: half of them try a new version, and four of either kind decide.
    online_config = OnlineConfig(
        trainer=trainer,
        online_dir=str(config.work_dir / "server"),
        canary_fraction=0.5,
        canary_min_requests=4,
        canary_max_requests=4,
    )
    online = OnlineLearning(online_config, engine_config, "demo")
    engine = await asyncio.to_thread(AsyncEngine, engine_config, capture=online.capture)
    server = GrpcServer(engine, ServerConfig(grpc_port=0))
    try:
        await online.start(engine)
        await server.start()
        async with GenerateClient(server.address) as client:
            yield _Running(engine, online, client)
    finally:
        await server.stop()
        await engine.close()
        await online.close()


@asynccontextmanager
async def _trainer(config: SessionConfig, cpus: Sequence[int]) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run `adaflash trainer` on its own processors, and yield it with its address."""
    log_path = config.work_dir / "trainer.log"
    folders = {name: config.work_dir / "trainer" / name for name in ("store", "spool", "state")}
    flags = [f"--{name}={path}" for name, path in folders.items()]
    flags += [f"--num-threads={len(cpus)}", f"--publish-interval-s={config.publish_interval_s}", "--grpc-port=0"]
    command = [sys.executable, "-m", "adaflash.cli.main", "trainer", f"--device={config.device}", *flags]
    with log_path.open("wb") as log, _pinned(cpus):
        process = await asyncio.create_subprocess_exec(
            *command,
            *config.trainer_flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": str(len(cpus))},
        )
    try:
        yield process, await _address_of(process, log_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _address_of(process: asyncio.subprocess.Process, log_path: Path) -> str:
    """Wait for the `ready address=...` line."""
    assert process.stdout is not None, "it was piped"
    try:
        line = await asyncio.wait_for(process.stdout.readline(), _START_TIMEOUT_S)
    except asyncio.TimeoutError as error:
        raise UnavailableError(f"the trainer was not ready after {_START_TIMEOUT_S:.0f} s; see {log_path}") from error
    for word in line.decode().split():
        if word.startswith("address="):
            return word.removeprefix("address=")
    raise UnavailableError(f"the trainer did not start; see {log_path}")


def _share_cpus() -> tuple[list[int], list[int]]:
    """Return processors of the server and of the trainer: two processes with a thread each on every one would fight."""
    cpus = sorted(os.sched_getaffinity(0))
    half = (len(cpus) + 1) // 2
    return cpus[:half], cpus[half:] or cpus


def _use_cpus(cpus: Sequence[int]) -> None:
    """Let the calling thread, and those it starts for its math, use these processors."""
    import torch

    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(len(set(cpus)))


@contextlib.contextmanager
def _pinned(cpus: Sequence[int]) -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, to some processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
