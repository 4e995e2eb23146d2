# SPDX-License-Identifier: Apache-2.0
"""Brings versions of the drafter into a running engine: loads and probes them aside, tries them, and goes back.

Runs in the event loop; the engine's own part, between two steps, is `rollout`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from adaflash.engine.async_engine import AsyncEngine
from adaflash.engine.engine import Engine
from adaflash.engine.rollout import CanaryResult, OnVerdict
from adaflash.errors import AdaFlashError, ConfigError, UnknownVersionError
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_loader import load_version
from adaflash.speculative.probe import probe
from adaflash.training.canary import CanaryConfig, Verdict
from adaflash.training.staging import StagedVersion, StagingArea
from adaflash.training.version_report import VersionEvent, VersionReport

logger = logging.getLogger(__name__)

LAST_GOOD, PREVIOUS = "last_good", "previous"  # pins of the staging area

_POLL_S = 0.02


class VersionReporter(Protocol):
    """Whom a server tells what became of a version; a VersionClient."""

    def report(self, report: VersionReport) -> None:
        """Pass a report on, sooner or later."""

    def mark_bad(self, version: int, reason: str) -> None:
        """Never offer a version again, here or anywhere."""


@dataclass(frozen=True)
class RolloutConfig:
    """How new versions are brought in.

    Attributes:
        canary: How each is tried.
        drain_timeout_s: What requests of a replaced version get to finish with it when the next one waits; then they
            go on with the newer one, at the price of acceptance.

    Raises:
        ConfigError: Names the field, its value and what is allowed.
    """

    canary: CanaryConfig = field(default_factory=CanaryConfig)
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ConfigError(f"drain_timeout_s={self.drain_timeout_s} is invalid: must be finite and >= 0")


@dataclass
class RolloutCounters:
    """What happened to versions since the start; they only grow, but for `load_s`, of the last one loaded."""

    num_promoted: int = 0
    num_rolled_back: int = 0
    num_refused: int = 0
    num_revoked: int = 0
    load_s: float = 0.0


class VersionManager:
    """Takes versions one at a time, the newest first; what comes meanwhile waits, and a newer one takes its place.

    Use it as `async with`, around what hands versions over. Versions up to `proven` have passed their trial elsewhere,
    or here before a restart, and go live at once, before any other.

    Args:
        engine: Has a drafter.
        checkpoint: Directory of the drafter the engine started with, version 0.
        staging: Where the versions are.
        config: How they are brought in.

    Attributes:
        active: The version that has passed and serves.
        proven: Highest version known to be good.
    """

    def __init__(self, engine: AsyncEngine, checkpoint: Path, staging: StagingArea, config: RolloutConfig) -> None:
        self._engine, self._checkpoint, self._staging, self._config = engine, checkpoint, staging, config
        self._reporter: VersionReporter | None = None
        self._pending: StagedVersion | None = None  # to be tried
        self._pending_proven: StagedVersion | None = None
        self._news = asyncio.Event()
        self._activated = asyncio.Event()
        self._candidate: int | None = None
        self._history = [0]  # versions that were active, the last one is
        self._task: asyncio.Task[None] | None = None
        self.proven = staging.pinned(LAST_GOOD)
        self.counters = RolloutCounters()

    @property
    def active(self) -> int:
        """The version that serves, candidates apart."""
        return self._history[-1]

    def versions_by_state(self) -> dict[str, int]:
        """Return the versions that are `active`, and, if there are any, `candidate`, on trial, and `pending`."""
        states = {"active": self.active}
        if self._candidate is not None:
            states["candidate"] = self._candidate
        waiting = [staged.version for staged in (self._pending, self._pending_proven) if staged is not None]
        if waiting:
            states["pending"] = max(waiting)
        return states

    def start(self, reporter: VersionReporter) -> None:
        """Begin, in the running event loop."""
        self._reporter = reporter
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; what is resident serves on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def take(self, staged: StagedVersion) -> None:
        """Take note of a version to bring in; `VersionClient`'s `on_version`."""
        if staged.version <= self.proven:
            self._pending_proven = staged
        else:
            self._pending = staged
        self._news.set()

    async def revoke(self, version: int, reason: str) -> None:
        """Stop using a version that must not be used; `VersionClient`'s `on_bad`."""
        if self._pending is not None and self._pending.version == version:
            self._pending = None
        if self._pending_proven is not None and self._pending_proven.version == version:
            self._pending_proven = None
        await self._engine.call(lambda engine: _end_candidate(engine, version, reason))
        self._history = [v for v in self._history if v != version or v == self.active]
        if version == self.active:
            await self._go_back(version)

    async def wait_for(self, version: int, timeout_s: float) -> bool:
        """Wait until this version or a newer one is active; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.active < version:
            self._activated.clear()
            try:
                await asyncio.wait_for(self._activated.wait(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                return False
        return True

    # ---- one version after another ---------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            staged = self._next()
            if staged is None:
                continue
            try:
                await self._roll_out(staged)
            except AdaFlashError as error:
                self._refuse(staged.version, str(error))
            except Exception as error:
                logger.exception("a version could not be brought in version=%d", staged.version)
                self._refuse(staged.version, repr(error))

    def _next(self) -> StagedVersion | None:
        if self._pending_proven is None:
            staged, self._pending = self._pending, None
            return staged
        staged, self._pending_proven = self._pending_proven, None
        if self._pending is not None:
            self._news.set()
        return staged

    async def _roll_out(self, staged: StagedVersion) -> None:
        await self._wait_for_room()
        newer = self._pending_proven if staged.version <= self.proven else self._pending
        if newer is not None or self._staging.is_bad(staged.version):
            return  # a newer one takes its place
        drafter = await self._load(staged.directory, staged.version)
        if staged.version <= self.proven:
            await self._introduce(drafter)
            self._activate(staged.version)
            return
        result = await self._try(drafter)
        if result.verdict is Verdict.PROMOTE:
            self._activate(staged.version, result)
            return
        self._report(staged.version, "rolled_back", result, result.reason)
        if result.verdict is Verdict.ROLL_BACK:
            self.counters.num_rolled_back += 1
            assert self._reporter is not None, "the manager has been started"
            self._reporter.mark_bad(staged.version, result.reason)

    async def _try(self, drafter: DFlashDrafter) -> CanaryResult:
        """Let a candidate draft for its share of new requests until it is decided."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[CanaryResult] = loop.create_future()

        def settle(result: CanaryResult) -> None:
            if not ended.done():
                ended.set_result(result)

        def on_verdict(result: CanaryResult) -> None:
            loop.call_soon_threadsafe(settle, result)

        canary = self._config.canary
        await self._introduce(drafter, canary, on_verdict)
        self._candidate = drafter.version
        self._report(drafter.version, "canary")
        try:
            return await ended
        finally:
            self._candidate = None

    async def _introduce(
        self, drafter: DFlashDrafter, canary: CanaryConfig | None = None, on_verdict: OnVerdict | None = None
    ) -> None:
        while not await self._engine.call(lambda engine: _introduce_if_room(engine, drafter, canary, on_verdict)):
            await self._wait_for_room()  # an older version came back meanwhile

    async def _wait_for_room(self) -> None:
        """Wait until the version before last has no requests left, or move them over when that takes too long."""
        deadline = time.monotonic() + self._config.drain_timeout_s
        while not await self._engine.call(lambda engine: engine.rollout.drafters.has_room):
            if time.monotonic() > deadline:
                await self._engine.call(_retire_draining)
            await asyncio.sleep(_POLL_S)

    async def _load(self, directory: Path, version: int) -> DFlashDrafter:
        """Load and probe a version; the engine goes on meanwhile.

        Raises:
            CheckpointError: It cannot be read, does not fit, or what it computes is not finite.
        """
        served = await self._engine.call(lambda engine: engine.rollout.drafters.current)
        assert isinstance(served, DFlashDrafter), "versions are those of a DFlash drafter"
        started = time.monotonic()
        drafter = await asyncio.to_thread(_load_and_probe, directory, served, version)
        self.counters.load_s = time.monotonic() - started
        return drafter

    def _activate(self, version: int, result: CanaryResult | None = None) -> None:
        if self.active > 0:
            self._staging.pin(PREVIOUS, self.active)
        self._history.append(version)
        self.proven = max(self.proven, version)
        self._staging.pin(LAST_GOOD, version)
        self.counters.num_promoted += 1
        self._activated.set()
        self._report(version, "activated", result)

    async def _go_back(self, version: int) -> None:
        """Replace the active version by the newest before it that can be loaded; version 0 always can."""
        self.counters.num_revoked += 1
        older = self._history[:-1]
        drafter = await self._load_newest(older)
        await self._engine.call(lambda engine: engine.rollout.go_back(drafter))
        self._history = [v for v in older if v < drafter.version] + [drafter.version]
        self._staging.pin(LAST_GOOD, drafter.version)
        self._report(version, "rolled_back", reason=f"went back to version {drafter.version}")

    async def _load_newest(self, versions: list[int]) -> DFlashDrafter:
        for version in reversed(versions):
            try:
                return await self._load(self._directory(version), version)
            except AdaFlashError as error:
                logger.warning("an older version cannot be loaded version=%d reason=%s", version, error)
        return await self._load(self._checkpoint, 0)

    def _directory(self, version: int) -> Path:
        if version == 0:
            return self._checkpoint
        stored = self._staging.find(version)
        if stored is None:
            raise UnknownVersionError(f"version {version} is not staged any more")
        return stored.directory

    def _refuse(self, version: int, reason: str) -> None:
        logger.warning("version refused version=%d reason=%s", version, reason)
        self.counters.num_refused += 1
        self._report(version, "refused", reason=reason)

    def _report(self, version: int, event: VersionEvent, result: CanaryResult | None = None, reason: str = "") -> None:
        assert self._reporter is not None, "the manager has been started"
        if result is None or not result.num_rounds:
            self._reporter.report(VersionReport(version, event, reason=reason))
            return
        length, num_rounds = result.candidate_acceptance_length, result.num_rounds
        accepted = round((length - 1) * num_rounds)
        self._reporter.report(VersionReport(version, event, length, num_rounds, 0, accepted, reason))


def _load_and_probe(directory: Path, served: DFlashDrafter, version: int) -> DFlashDrafter:
    drafter = load_version(directory, served, version)
    drafter.pack()
    probe(drafter)
    return drafter


def _introduce_if_room(
    engine: Engine, drafter: DFlashDrafter, canary: CanaryConfig | None, on_verdict: OnVerdict | None
) -> bool:
    has_room = engine.rollout.drafters.has_room
    if has_room:
        engine.rollout.introduce(drafter, canary, on_verdict)
    return has_room


def _end_candidate(engine: Engine, version: int, reason: str) -> None:
    if engine.rollout.drafters.candidate == version:
        engine.rollout.roll_back(reason)


def _retire_draining(engine: Engine) -> None:
    draining = engine.rollout.drafters.draining
    if draining is not None:
        engine.rollout.retire(draining)
