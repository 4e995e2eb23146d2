# SPDX-License-Identifier: Apache-2.0
"""Keeps a server supplied with the trainer's newest version, without ever getting in its way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple

import grpc

from adaflash.errors import AdaFlashError, PayloadError, UnavailableError
from adaflash.rpc.backoff import Backoff
from adaflash.rpc.client import ClientTls
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.pb import trainer_pb2_grpc
from adaflash.rpc.trainer_convert import VersionOffer, check_server_id, offer_from_pb
from adaflash.rpc.version_fetch import ChunkError, ClientTimeouts, MismatchError, VersionFetcher
from adaflash.rpc.version_reports import ReportSender
from adaflash.training.payload import PayloadChecker
from adaflash.training.staging import StagedVersion, StagingArea
from adaflash.training.version_report import VersionReport

logger = logging.getLogger(__name__)

State = Literal["stopped", "resuming", "connecting", "subscribed", "fetching", "handing_over", "backing_off"]
OnVersion = Callable[[StagedVersion], Awaitable[None]]
OnBad = Callable[[int, str], Awaitable[None]]

MAX_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class TrainerAddress:
    """How to reach a trainer.

    Attributes:
        address: `host:port`.
        token: The trainer's token, sent as a bearer token; not the API key of inference.
        tls: Switches TLS on.
    """

    address: str
    token: str | None = None
    tls: ClientTls | None = None


@dataclass(frozen=True)
class RetryPolicy:
    """How a client goes on after failures.

    Attributes:
        initial_s: The longest wait before the first retry.
        max_s: The longest wait; retries never end.
        max_attempts: Chunks in a row, or files, of one version that may be wrong; then it is left for a newer one.
    """

    initial_s: float = 0.5
    max_s: float = 30.0
    max_attempts: int = 4


class ClientStatus(NamedTuple):
    """What a client does: `state` since `since` (time.monotonic), with `version` if it is about one."""

    state: State
    version: int | None
    since: float
    last_error: str | None
    num_bytes_received: int


class VersionClient:
    """Subscribes to a trainer, fetches and checks each new version, and hands it over; reconnects for ever.

    Versions are handed over in growing order, at most once while it runs. When it starts, the proven version is handed
    over first, and then the newest good one that an earlier process staged, trainer or no trainer. Use it as
    `async with VersionClient(...)`.

    Args:
        trainer: Where the trainer is.
        server_id: This server's name among those of the trainer.
        staging: Where versions are kept; stays open.
        checker: Refuses what does not fit the drafter being served.
        on_version: Takes a version, e.g. loads it and begins a canary. An AdaFlashError refuses the version; whatever
            it raises, the client goes on.
        on_bad: Told of a version and the reason when the trainer says that it must not be used.
        active_version: What is served already; only newer versions are handed over.
        proven_version: What passed its trial, here or elsewhere, and is to be served before anything newer; 0 for none.
        proven_offer: Where the trainer has it, in case that it is not staged.
        timeouts: Limits of every state.
        retry: What to do after failures.
        chunk_bytes: Size of a chunk, at most 1 MiB.

    Raises:
        RequestError: `server_id` is empty or too long.
    """

    def __init__(
        self,
        trainer: TrainerAddress,
        server_id: str,
        staging: StagingArea,
        checker: PayloadChecker,
        on_version: OnVersion,
        *,
        on_bad: OnBad | None = None,
        active_version: int = 0,
        proven_version: int = 0,
        proven_offer: VersionOffer | None = None,
        timeouts: ClientTimeouts | None = None,
        retry: RetryPolicy | None = None,
        chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        check_server_id(server_id)
        assert 0 < chunk_bytes <= MAX_CHUNK_BYTES, f"chunk_bytes={chunk_bytes} must be in [1, {MAX_CHUNK_BYTES}]"
        self._trainer, self._server_id, self._staging, self._checker = trainer, server_id, staging, checker
        self._on_version, self._on_bad = on_version, on_bad
        self._timeouts, self._retry = timeouts or ClientTimeouts(), retry or RetryPolicy()
        self._chunk_bytes = chunk_bytes
        self._active_version = active_version
        assert proven_offer is None or proven_offer.version == proven_version, "the offer is of the proven version"
        self._proven_version, self._proven_offer = proven_version, proven_offer
        self._next_version = max(active_version + 1, staging.highest)
        self._given_up: set[int] = set()
        self._failures = _Failures()
        self._offer: VersionOffer | None = None
        self._offered = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._state: State = "stopped"
        self._state_version: int | None = None
        self._since = time.monotonic()
        self._last_error: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Begin, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._channel = open_channel(self._trainer, self._retry, self._timeouts.connect_s)
        self._stub: Any = trainer_pb2_grpc.TrainerStub(self._channel)  # type: ignore[no-untyped-call]
        token = self._trainer.token
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._fetcher = VersionFetcher(
            self._stub, self._metadata, self._staging, self._checker, self._timeouts, self._chunk_bytes
        )
        self._reports = ReportSender(
            self._stub,
            self._metadata,
            self._server_id,
            self._timeouts.report_s,
            Backoff(self._retry.initial_s, self._retry.max_s),
        )
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._reports.run())]

    async def close(self) -> None:
        """Stop; a version being fetched stays half done, for the next start."""
        running: set[asyncio.Task[None]] = set(self._tasks)
        while running:
            # Before Python 3.12, wait_for loses a cancellation that comes with its result: hence again and again.
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.05)
        await self._channel.close(None)
        self._enter("stopped")

    async def __aenter__(self) -> VersionClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def status(self) -> ClientStatus:
        """What it does at the moment."""
        num_bytes = self._fetcher.num_bytes_received if self._tasks else 0
        return ClientStatus(self._state, self._state_version, self._since, self._last_error, num_bytes)

    def report(self, report: VersionReport) -> None:
        """Tell the trainer what became of a version, now or when it is there again; from any thread."""
        assert self._loop is not None, "a client reports after its start"
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and the process with it
            self._loop.call_soon_threadsafe(self._reports.put, report)

    def mark_bad(self, version: int, reason: str) -> None:
        """Never take a version again, here or, once the trainer knows, anywhere; from any thread."""
        if self._staging.mark_bad(version, reason):
            self.report(VersionReport(version, "bad", reason=reason))

    # ---- states ----------------------------------------------------------------------------------------------

    def _enter(self, state: State, version: int | None = None) -> None:
        self._state, self._state_version, self._since = state, version, time.monotonic()

    async def _run(self) -> None:
        backoff = Backoff(self._retry.initial_s, self._retry.max_s)
        await self._guarded(self._resume())
        while True:
            before, started = self._fetcher.num_bytes_received, time.monotonic()
            await self._guarded(self._session())
            if self._fetcher.num_bytes_received > before or time.monotonic() - started > self._retry.max_s:
                backoff.reset()
            self._enter("backing_off")
            await backoff.wait()

    async def _guarded(self, step: Awaitable[None]) -> None:
        """Run a step; whatever it raises is logged, once if it goes on."""
        try:
            await step
        except grpc.aio.AioRpcError as error:
            self._note(f"{error.code().name}: {error.details()}")
        except asyncio.TimeoutError:
            self._note(f"state {self._state} took too long")
        except (AdaFlashError, OSError) as error:
            self._note(str(error))
        except Exception as error:
            logger.exception("the version client failed, and goes on state=%s", self._state)
            self._last_error = repr(error)

    def _note(self, error: str) -> None:
        level = logging.DEBUG if error == self._last_error else logging.WARNING
        logger.log(
            level, "no new versions for now trainer=%s state=%s reason=%s", self._trainer.address, self._state, error
        )
        self._last_error = error

    async def _resume(self) -> None:
        """Hand over what is staged already: the proven version, and the newest good one.

        Where the proven one must be fetched first, the newest waits for the trainer to announce it.
        """
        self._enter("resuming")
        if self._proven_version > self._active_version and await self._resume_version(self._proven_version):
            self._proven_offer = None
        if self._proven_offer is not None:
            return
        for version in reversed(self._staging.versions()):
            if version <= max(self._active_version, self._proven_version) or await self._resume_version(version):
                return

    async def _resume_version(self, version: int) -> bool:
        """Hand over a staged version; False when it is not there, or not good."""
        stored = self._staging.find(version)
        if self._staging.is_bad(version) or stored is None:
            return False
        check = asyncio.to_thread(self._checker.check, stored.directory, stored.manifest)
        try:
            await asyncio.wait_for(check, self._timeouts.verify_s)
        except PayloadError as error:
            logger.warning("a staged version is removed version=%d reason=%s", version, error)
            self._staging.discard(version)
            return False
        await self._hand_over(StagedVersion(version, stored.directory, stored.manifest))
        return True

    async def _session(self) -> None:
        """Take what the trainer announces until something fails."""
        self._enter("connecting")
        request = pb.SubscribeVersionsRequest(from_version=self._next_version, server_id=self._server_id)
        call = self._stub.SubscribeVersions(request, metadata=self._metadata)
        listening: asyncio.Task[None] | None = None
        try:
            await asyncio.wait_for(call.initial_metadata(), self._timeouts.connect_s)
            if not call.done():
                self._enter("subscribed")
                self._last_error = None
            listening = asyncio.create_task(self._listen(call))
            if self._proven_offer is not None:
                await self._take(self._proven_offer)
                self._proven_offer = None
                self._enter("subscribed")
            while True:
                await self._wait_for_offer(listening)
                offer, self._offer = self._offer, None
                if offer is not None:
                    await self._deliver(offer)
                    self._enter("subscribed")
        finally:
            call.cancel()
            if listening is not None:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def _wait_for_offer(self, listening: asyncio.Task[None]) -> None:
        offered = asyncio.create_task(self._offered.wait())
        try:
            await asyncio.wait({listening, offered}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            offered.cancel()
        if listening.done():
            listening.result()
            raise UnavailableError("the trainer ended the subscription")
        self._offered.clear()

    async def _listen(self, call: Any) -> None:
        """Read announcements, so that the trainer never waits; only the newest version counts."""
        async for message in call:
            offer = offer_from_pb(message)
            if offer.bad_reason is None:
                self._offer = offer
                self._offered.set()
            else:
                await self._note_bad(offer.version, offer.bad_reason)

    async def _deliver(self, offer: VersionOffer) -> None:
        """Fetch a version and hand it over, or give it up for good reason; raises what a retry may cure."""
        version = offer.version
        if version >= self._next_version:
            await self._take(offer)

    async def _take(self, offer: VersionOffer) -> None:
        version = offer.version
        if version in self._given_up or self._staging.is_bad(version):
            return
        self._enter("fetching", version)
        before = self._fetcher.num_bytes_received
        try:
            staged = await self._fetcher.fetch(offer)
        except PayloadError as error:
            self._give_up(version, str(error))
        except (ChunkError, MismatchError) as error:
            has_progressed = self._fetcher.num_bytes_received > before
            if self._failures.count(version, error, has_progressed) < self._retry.max_attempts:
                raise
            self._give_up(version, str(error))
        except grpc.aio.AioRpcError as error:
            await self._on_refused_fetch(version, error)
        else:
            await self._hand_over(staged)

    async def _on_refused_fetch(self, version: int, error: grpc.aio.AioRpcError) -> None:
        if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
            await self._note_bad(version, error.details() or "the trainer says so")
        elif error.code() == grpc.StatusCode.NOT_FOUND:
            logger.info("the trainer has removed a version before it was fetched version=%d", version)
            self._given_up.add(version)
        elif error.code() in (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.OUT_OF_RANGE):
            self._give_up(version, f"the trainer cannot send it: {error.details()}")
        else:
            raise error

    async def _hand_over(self, staged: StagedVersion) -> None:
        version = staged.version
        if self._staging.is_bad(version):
            return
        self._enter("handing_over", version)
        await asyncio.to_thread(self._staging.note_handed_over, version)
        self._next_version = max(self._next_version, version + 1)
        logger.info("version staged version=%d train_step=%d", version, staged.manifest.train_step)
        self.report(VersionReport(version, "staged"))
        try:
            await asyncio.wait_for(self._on_version(staged), self._timeouts.handover_s)
        except asyncio.TimeoutError:
            self._give_up(version, f"it was not taken within {self._timeouts.handover_s} s")
        except AdaFlashError as error:
            self._give_up(version, str(error))
        except Exception as error:
            logger.exception("a version could not be taken version=%d", version)
            self._give_up(version, repr(error))

    async def _note_bad(self, version: int, reason: str) -> None:
        is_new = await asyncio.to_thread(self._staging.mark_bad, version, reason)
        if is_new and self._on_bad is not None:
            try:
                await asyncio.wait_for(self._on_bad(version, reason), self._timeouts.handover_s)
            except Exception:
                logger.exception("nobody took note that a version is bad version=%d", version)

    def _give_up(self, version: int, reason: str) -> None:
        logger.warning("version refused version=%d reason=%s", version, reason)
        self._given_up.add(version)
        self.report(VersionReport(version, "refused", reason=reason))


class _Failures:
    """Counts how often a version arrived wrong: chunks in a row, or whole files."""

    def __init__(self) -> None:
        self._version = 0
        self._num_chunks = self._num_files = 0

    def count(self, version: int, error: ChunkError | MismatchError, has_progressed: bool) -> int:
        """Add a failure and return how often that kind has happened."""
        if version != self._version:
            self._version, self._num_chunks, self._num_files = version, 0, 0
        if isinstance(error, MismatchError):
            self._num_files += 1
            return self._num_files
        self._num_chunks = 1 if has_progressed else self._num_chunks + 1
        return self._num_chunks


def open_channel(trainer: TrainerAddress, retry: RetryPolicy, connect_s: float) -> grpc.aio.Channel:
    """Return a channel to a trainer that reconnects by itself."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", 2 * MAX_CHUNK_BYTES),
        # A trainer that is gone without a word, or stopped, is noticed within 40 s.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # How long one attempt to connect may take; the client's own waits decide when to try again.
        ("grpc.min_reconnect_backoff_ms", max(1, round(1000 * connect_s))),
        ("grpc.initial_reconnect_backoff_ms", max(1, round(500 * retry.initial_s))),
        ("grpc.max_reconnect_backoff_ms", max(1, round(500 * retry.max_s))),
    ]
    if trainer.tls is None:
        return grpc.aio.insecure_channel(trainer.address, options=options)
    return grpc.aio.secure_channel(trainer.address, trainer.tls.credentials, options=[*options, *trainer.tls.options])
