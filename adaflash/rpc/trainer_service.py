# SPDX-License-Identifier: Apache-2.0
"""The Trainer service: hands out the versions of a weight store, and takes trajectories and reports."""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeAlias

import grpc

from adaflash import __version__
from adaflash.errors import (
    BadVersionError,
    CapacityError,
    DamagedVersionError,
    RequestError,
    UnavailableError,
    UnknownVersionError,
    WeightError,
)
from adaflash.rpc import trainer_convert as convert
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.pb import trainer_pb2_grpc
from adaflash.rpc.status import OffsetError
from adaflash.rpc.stream import write_within
from adaflash.rpc.trajectory_intake import TrajectoryIntake, TrajectorySink
from adaflash.training.republish import republish
from adaflash.training.version_report import VersionReport
from adaflash.training.weight_store import WeightStore

logger = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Trainer"].full_name
MAX_CHUNK_BYTES = 1 << 20
MAX_SUBSCRIBERS = 1024
MAX_SERVERS = 4096
MAX_KEY_CHARS = 256
# Names of the store's pins.
ACTIVE, LAST_GOOD, TRIAL = "active", "last_good", "trial"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class TrainerService(trainer_pb2_grpc.TrainerServicer):
    """Serves `adaflash.v1.Trainer`; errors leave as AdaFlashError, the interceptors turn them into statuses.

    Args:
        store: What is handed out; versions may be published to it from any thread.
        sink: Takes the trajectories; the ids of those it has are read here.
        target_digest: Of the target that is trained for; trajectories of another one are invalid.
        stall_timeout_s: A client that reads nothing for so long while a message waits is cut.

    Attributes:
        num_active: Calls in progress, subscriptions apart.
        num_subscribers: Subscriptions.
    """

    def __init__(self, store: WeightStore, sink: TrajectorySink, target_digest: str, stall_timeout_s: float) -> None:
        self._store, self._target_digest = store, target_digest
        self._stall_timeout_s = stall_timeout_s
        self._intake = TrajectoryIntake(sink, target_digest)
        self._servers: dict[str, pb.ReportVersionRequest] = {}
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False
        self.num_active = 0
        self.num_subscribers = 0

    def open(self) -> None:
        """Watch the store; call in the event loop that serves."""
        self._loop = asyncio.get_running_loop()
        self._store.add_listener(self._on_store_changed)

    def close(self) -> None:
        """Watch the store no more, and end every subscription with UNAVAILABLE."""
        if self._loop is not None:
            self._store.remove_listener(self._on_store_changed)
            self._loop = None
        self._is_closing = True
        self._wake()

    async def SubmitTrajectories(  # noqa: N802
        self, requests: AsyncIterator[pb.TrajectoryRecord], context: Context
    ) -> pb.SubmitTrajectoriesResponse:
        """Pass trajectories on; an invalid one is counted, and the others of its stream are taken."""
        with self._counted():
            return await self._intake.take_all(requests)

    async def SubscribeVersions(self, request: pb.SubscribeVersionsRequest, context: Context) -> None:  # noqa: N802
        """Announce versions and bad marks until the client leaves or the trainer closes."""
        convert.check_server_id(request.server_id)
        if self.num_subscribers >= MAX_SUBSCRIBERS:
            raise CapacityError(f"{MAX_SUBSCRIBERS} servers are subscribed already", retry_after_s=30.0)
        # Tells the client at once that it is subscribed; there may be nothing to announce for hours.
        await context.send_initial_metadata(())
        await asyncio.to_thread(self._store.skip_to, request.from_version)
        told: set[int] = set()
        next_version = request.from_version
        self.num_subscribers += 1
        try:
            while True:
                changed = self._changed
                if self._is_closing:
                    raise UnavailableError("the trainer is shutting down; subscribe again")
                for message in self._news(next_version, told):
                    if not message.is_bad:
                        next_version = message.version + 1
                    await write_within(context, message, self._stall_timeout_s)
                await changed.wait()
        finally:
            self.num_subscribers -= 1

    async def FetchVersion(self, request: pb.FetchVersionRequest, context: Context) -> None:  # noqa: N802
        """Send a part of a file."""
        with self._counted():
            stream = await asyncio.to_thread(self._store.open_file, request.version, request.file)
            with stream:
                size = os.fstat(stream.fileno()).st_size
                if request.offset > size:
                    raise OffsetError(f"offset={request.offset} is beyond the end of {request.file}: {size} bytes")
                end = min(size, request.offset + (request.max_bytes or size))
                for offset in range(request.offset, end, MAX_CHUNK_BYTES):
                    num_bytes = min(MAX_CHUNK_BYTES, end - offset)
                    data = await asyncio.to_thread(_read, stream, offset, num_bytes)
                    if len(data) != num_bytes:
                        raise DamagedVersionError(
                            f"{request.file} of version {request.version} ended while it was read"
                        )
                    chunk = pb.FileChunk(offset=offset, data=data, crc32=zlib.crc32(data))
                    await write_within(context, chunk, self._stall_timeout_s)

    async def ReportVersion(  # noqa: N802
        self, request: pb.ReportVersionRequest, context: Context
    ) -> pb.ReportVersionResponse:
        """Note what became of a version; a bad one is bad for everyone."""
        report = convert.report_from_pb(request)
        if report.version >= self._store.next_version:
            raise UnknownVersionError(f"version {report.version} was never published")
        logger.info(
            "version reported server=%s version=%d event=%s acceptance_length=%.3f reason=%s",
            ascii(request.server_id),
            report.version,
            report.event,
            report.acceptance_length,
            ascii(report.reason),
        )
        with self._counted():
            await asyncio.to_thread(self._apply, report, request.server_id)
        self._servers.pop(request.server_id, None)
        self._servers[request.server_id] = request
        while len(self._servers) > MAX_SERVERS:
            del self._servers[next(iter(self._servers))]
        return pb.ReportVersionResponse()

    async def ActivateVersion(  # noqa: N802
        self, request: pb.ActivateVersionRequest, context: Context
    ) -> pb.ActivateVersionResponse:
        """Publish an older version's weights again."""
        if len(request.idempotency_key) > MAX_KEY_CHARS:
            raise RequestError("idempotency_key", request.idempotency_key, f"at most {MAX_KEY_CHARS} characters")
        with self._counted():
            version = await asyncio.to_thread(self._republish, request.version, request.idempotency_key)
        logger.info("version published again version=%d as=%d", request.version, version)
        return pb.ActivateVersionResponse(version=version)

    async def GetStatus(self, request: pb.GetTrainerStatusRequest, context: Context) -> pb.TrainerStatus:  # noqa: N802
        """Say what there is."""
        newest, bad, pins = self._store.newest(), self._store.bad, self._store.pins
        versions = {stored.version: convert.offer_to_pb(stored) for stored in self._store.versions()}
        for version, reason in bad.items():
            versions.setdefault(version, pb.VersionInfo()).MergeFrom(convert.bad_version_to_pb(version, reason))
        return pb.TrainerStatus(
            package_version=__version__,
            target_digest=self._target_digest,
            newest_version=0 if newest is None else newest.version,
            active_version=pins.get(ACTIVE, 0),
            last_good_version=pins.get(LAST_GOOD, 0),
            versions=[versions[version] for version in sorted(versions)],
            damaged=self._store.damaged,
            num_subscribers=self.num_subscribers,
            trajectories=self._intake.total,
            servers=self._servers.values(),
            pins=pins,
        )

    # ---- announcing ------------------------------------------------------------------------------------------

    def _on_store_changed(self) -> None:
        """Called by the store, from whatever thread published."""
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """Wake every subscription; each looks for itself what is new to it, so none waits for another."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _news(self, next_version: int, told: set[int]) -> Iterator[pb.VersionInfo]:
        for version, reason in self._store.bad.items():
            if version not in told:
                told.add(version)
                yield convert.bad_version_to_pb(version, reason)
        newest = self._store.newest(next_version)
        if newest is not None:
            yield convert.offer_to_pb(newest)

    # ---- what servers say -------------------------------------------------------------------------------------

    def _republish(self, version: int, idempotency_key: str) -> int:
        try:
            return republish(self._store, version, idempotency_key)
        except (UnknownVersionError, BadVersionError, DamagedVersionError):
            raise
        except WeightError as error:
            raise UnavailableError(f"version {version} cannot be published again: {error}") from error

    def _apply(self, report: VersionReport, server_id: str) -> None:
        """Mark bad, and pin what is on trial, the newest version that proved itself, and the one before it."""
        if report.event == "bad" and report.version > 0:
            self._store.mark_bad(report.version, f"{server_id}: {report.reason}")
        pins = self._store.pins
        active, last_good = pins.get(ACTIVE, 0), pins.get(LAST_GOOD, 0)
        if report.event == "activated" and report.version > active:
            self._pin(LAST_GOOD, active)
            self._pin(ACTIVE, report.version)
        elif report.event in ("rolled_back", "bad") and report.version == active:
            # After two in a row there is none left that proved itself.
            self._pin(ACTIVE, 0 if last_good == active or last_good in self._store.bad else last_good)
        if self._store.pins.get(LAST_GOOD) in self._store.bad:
            self._pin(LAST_GOOD, 0)
        trial = f"{TRIAL}:{server_id}"
        if report.event == "canary":
            self._pin(trial, report.version)
        elif report.event != "staged" and self._store.pins.get(trial) == report.version:
            self._pin(trial, 0)
        pins = self._store.pins
        for name, version in pins.items():  # a server that is gone would keep its version for ever
            if name.startswith(f"{TRIAL}:") and version <= pins.get(ACTIVE, 0):
                self._pin(name, 0)

    def _pin(self, name: str, version: int) -> None:
        try:
            if version > 0:
                self._store.pin(name, version)
            else:
                self._store.unpin(name)
        except (UnknownVersionError, BadVersionError, DamagedVersionError) as error:
            logger.warning("a version cannot be pinned pin=%s reason=%s", name, error)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1


def _read(stream: BinaryIO, offset: int, num_bytes: int) -> bytes:
    stream.seek(offset)
    return stream.read(num_bytes)
