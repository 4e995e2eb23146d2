# SPDX-License-Identifier: Apache-2.0
"""Sends a server's trajectories from its spool to the trainer, without ever getting in the way of serving.

A batch is read, encoded and acknowledged in threads. It counts as delivered with the trainer's reply; until then it is
sent again, whole, and the trainer recognises by their ids the trajectories that it has.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple

import grpc

from adaflash.durable_files import replace_file
from adaflash.models.strict_json import parse_json
from adaflash.rpc.backoff import Backoff
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.trainer_convert import trajectory_to_pb
from adaflash.rpc.version_client import RetryPolicy, TrainerAddress, open_channel
from adaflash.training.trajectories import START, Position, Record, TrajectorySpool

logger = logging.getLogger(__name__)

State = Literal["stopped", "reading", "sending", "backing_off"]

POSITION_FILE = "uploaded.json"
_METHOD = "/adaflash.v1.Trainer/SubmitTrajectories"
_MAX_BATCH_RECORDS = 1024
# How often the spool is looked at while it has nothing new.
_POLL_S = 0.2
# A message the trainer does not understand, or one larger than it takes: sending the same again cures neither.
_REFUSING_CODES = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED})


@dataclass
class UploadCounters:
    """What became of trajectories since the start.

    Attributes:
        num_sent: Sent, each time counted.
        num_bytes: Bytes of those messages.
        num_accepted: Taken by the trainer.
        num_duplicate: The trainer had them already.
        num_invalid: Refused for ever, as those of another target; they are not sent again.
        num_dropped: The trainer could not take them at the time; they are sent again.
    """

    num_sent: int = 0
    num_bytes: int = 0
    num_accepted: int = 0
    num_duplicate: int = 0
    num_invalid: int = 0
    num_dropped: int = 0


class UploadStatus(NamedTuple):
    """What an uploader does: `state` since `since` (time.monotonic); all before `position` has been delivered."""

    state: State
    since: float
    position: Position
    last_error: str | None
    counters: UploadCounters


class _Batch(NamedTuple):
    """Messages for the wire, and the position behind their records."""

    messages: list[bytes]
    end: Position


class TrajectoryUploader:
    """Uploads a spool's trajectories, oldest first, each at least once; reconnects for ever.

    Those that the trainer refuses are counted and left behind. Those it cannot take at the time, say because its disk
    is full, are sent again until it can; meanwhile they wait in the spool, within the spool's bounds. How far it has
    come is written into the spool's directory, so that a restart sends one batch again at most. Use it as
    `async with TrajectoryUploader(...)`; the spool must be open meanwhile.

    Args:
        trainer: Where the trainer is.
        spool: What is uploaded; nobody else acknowledges its records.
        timeout_s: How long a batch may take; what the trainer took of it by then, it has.
        retry: How long to wait after failures, and how often a trajectory may be refused as a message.
        max_batch_bytes: Most bytes of a batch on disk, unless one trajectory alone has more.
    """

    def __init__(
        self,
        trainer: TrainerAddress,
        spool: TrajectorySpool,
        *,
        timeout_s: float = 120.0,
        retry: RetryPolicy | None = None,
        max_batch_bytes: int = 8 << 20,
    ) -> None:
        assert max_batch_bytes > 0, f"max_batch_bytes={max_batch_bytes} must be > 0"
        self._trainer, self._spool = trainer, spool
        self._timeout_s, self._retry = timeout_s, retry or RetryPolicy()
        self._max_batch_bytes, self._max_records = max_batch_bytes, _MAX_BATCH_RECORDS
        self._num_refusals = 0
        self._counters = UploadCounters()
        self._position = START
        self._state: State = "stopped"
        self._since = time.monotonic()
        self._last_error: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> TrajectoryUploader:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Begin, in the running event loop, behind what an earlier process delivered."""
        self._position = await asyncio.to_thread(self._restore)
        self._spool.acknowledge(self._position)
        self._channel = open_channel(self._trainer, self._retry, self._timeout_s)
        # Messages are encoded in a thread: with captured features that takes milliseconds each.
        self._submit = self._channel.stream_unary(
            _METHOD, request_serializer=None, response_deserializer=pb.SubmitTrajectoriesResponse.FromString
        )
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; what was not delivered stays in the spool."""
        while self._task is not None and not self._task.done():
            # Before Python 3.12, wait_for loses a cancellation that comes with its result: hence again and again.
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.05)
        await self._channel.close(None)
        self._enter("stopped")

    @property
    def status(self) -> UploadStatus:
        """What it does at the moment."""
        return UploadStatus(self._state, self._since, self._position, self._last_error, self._counters)

    # ---- states ----------------------------------------------------------------------------------------------

    def _enter(self, state: State) -> None:
        if state != self._state:
            self._state, self._since = state, time.monotonic()

    async def _run(self) -> None:
        backoff = Backoff(self._retry.initial_s, self._retry.max_s)
        while True:
            if await self._guarded():
                backoff.reset()
            else:
                self._enter("backing_off")
                await backoff.wait()

    async def _guarded(self) -> bool:
        """Upload a batch, or wait for one; False when it must be tried again later. Raises nothing."""
        try:
            self._enter("reading")
            batch = await asyncio.to_thread(self._read)
            if batch is None:
                await asyncio.sleep(_POLL_S)
                return True
            self._enter("sending")
            return await self._upload(batch)
        except grpc.aio.AioRpcError as error:
            self._note(f"{error.code().name}: {error.details()}")
        except Exception as error:
            logger.exception("the trajectory uploader failed, and goes on state=%s", self._state)
            self._last_error = repr(error)
        return False

    def _note(self, error: str) -> None:
        level = logging.DEBUG if error == self._last_error else logging.WARNING
        logger.log(level, "trajectories wait trainer=%s reason=%s", self._trainer.address, error)
        self._last_error = error

    async def _upload(self, batch: _Batch) -> bool:
        try:
            reply = await self._send(batch.messages)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSING_CODES:
                raise
            return await self._on_refused(batch, error)
        self._num_refusals = 0
        if reply.num_received != len(batch.messages):
            self._note(f"the trainer received {reply.num_received} of {len(batch.messages)} trajectories")
            return False
        self._counters.num_accepted += reply.num_accepted
        self._counters.num_duplicate += reply.num_duplicate
        self._counters.num_dropped += reply.num_dropped
        if reply.num_dropped:
            self._note(f"the trainer cannot take trajectories: it dropped {reply.num_dropped}")
            return False
        self._counters.num_invalid += reply.num_invalid
        if reply.num_invalid:
            self._note(f"the trainer refuses trajectories: {reply.first_invalid}")
        else:
            self._last_error = None
        self._max_records = min(2 * self._max_records, _MAX_BATCH_RECORDS)
        await asyncio.to_thread(self._advance, batch.end)
        return True

    async def _send(self, messages: list[bytes]) -> pb.SubmitTrajectoriesResponse:
        token = self._trainer.token
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._counters.num_sent += len(messages)
        self._counters.num_bytes += sum(map(len, messages))
        reply: pb.SubmitTrajectoriesResponse = await self._submit(
            iter(messages), metadata=metadata, timeout=self._timeout_s
        )
        return reply

    async def _on_refused(self, batch: _Batch, error: grpc.aio.AioRpcError) -> bool:
        """Find the message that the trainer does not take, by halves, and leave it behind."""
        if len(batch.messages) > 1:
            self._max_records = len(batch.messages) // 2
            return True
        self._note(f"{error.code().name}: {error.details()}")
        self._num_refusals += 1
        if self._num_refusals < self._retry.max_attempts:
            return False
        logger.warning("a trajectory is given up num_bytes=%d reason=%s", len(batch.messages[0]), error.details())
        self._num_refusals = 0
        self._counters.num_invalid += 1
        await asyncio.to_thread(self._advance, batch.end)
        return True

    # ---- in threads ------------------------------------------------------------------------------------------

    def _read(self) -> _Batch | None:
        """Return the next batch; None when the spool has nothing new."""
        while records := self._spool.read(self._position, self._max_records, self._max_batch_bytes):
            messages = [message for record in records if (message := self._encode(record)) is not None]
            if messages:
                return _Batch(messages, records[-1].end)
            self._advance(records[-1].end)
        return None

    def _encode(self, record: Record) -> bytes | None:
        try:
            return trajectory_to_pb(record.trajectory).SerializeToString()
        except (ValueError, TypeError, IndexError) as error:
            self._counters.num_invalid += 1
            logger.warning("a trajectory cannot be sent id=%s reason=%s", ascii(record.trajectory.record_id), error)
            return None

    def _advance(self, position: Position) -> None:
        """Remember that all before a position is delivered, and let go of it."""
        self._position = position
        try:
            replace_file(self._spool.directory / POSITION_FILE, json.dumps(position._asdict()).encode())
        except OSError as error:
            logger.warning("a restart would send trajectories again: the position is not saved reason=%s", error)
        self._spool.acknowledge(position)

    def _restore(self) -> Position:
        position, end = self._saved_position(), self._spool.end
        if position <= end:
            return position
        # The end of the last segment was damaged and cut off; or the spool was emptied and counts from the start again.
        return end if position.segment == end.segment else START

    def _saved_position(self) -> Position:
        path = self._spool.directory / POSITION_FILE
        try:
            values = parse_json(path.read_bytes())
            if not isinstance(values, dict) or any(type(values.get(name)) is not int for name in Position._fields):
                raise ValueError("it is no position")
            return Position(values["segment"], values["offset"])
        except FileNotFoundError:
            return START
        except (OSError, ValueError) as error:
            logger.warning("trajectories may be sent again: %s cannot be read reason=%s", path, error)
            return START
