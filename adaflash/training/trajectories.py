# SPDX-License-Identifier: Apache-2.0
"""What a served sample teaches, and the spool that keeps such trajectories on disk until a trainer has them.

The spool is a directory of append-only segments, written by its own thread: `put` only hands over. It is bounded in
bytes and age (whole segments are dropped, oldest first), survives restarts, and neither a full disk nor a damaged file
raises into serving: what is lost is counted.
"""

from __future__ import annotations

import errno
import json
import logging
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaflash.errors import ConfigError

logger = logging.getLogger(__name__)

FeatureArray = npt.NDArray[np.float32]

_MAGIC = b"AFTR"
_HEADER = struct.Struct("<4sII")  # magic, payload bytes, crc32 of the payload
_SUFFIX = ".spool"
_MAX_RECORD_BYTES = 1 << 30
_QUEUE_SIZE = 256


class RoundCounts(NamedTuple):
    """One decode round: drafts that were verified, and how many of them were accepted."""

    num_verified: int
    num_accepted: int


class TrajectoryFeatures(NamedTuple):
    """The target's own forward over a trajectory, so that a trainer needs none.

    `taps` [N, len(tap_layer_ids) * H] and `hidden` [N, H] (after the final norm) of the first N tokens.
    """

    taps: FeatureArray
    hidden: FeatureArray


@dataclass(frozen=True)
class Trajectory:
    """One finished sample.

    Attributes:
        request_id: The request's id, for logs only.
        sample_index: Which of its samples.
        token_ids: Prompt, then output.
        num_prompt_tokens: Tokens of the prompt; the rest is the response a drafter learns.
        rounds: Verified and accepted drafts of every decode round.
        drafter_version: Version that drafted for it.
        target_digest: Digest of the target's weights; a trainer refuses those of another target.
        temperature: As requested; 0 is greedy.
        features: With supervision `captured`, of all tokens but the last, which had no forward; None: the trainer runs
            the target (`recompute`).
    """

    request_id: str
    sample_index: int
    token_ids: list[int]
    num_prompt_tokens: int
    rounds: list[RoundCounts]
    drafter_version: int
    target_digest: str
    temperature: float
    features: TrajectoryFeatures | None = None

    def to_bytes(self) -> bytes:
        """Return the record's payload: a JSON line, then the arrays' raw little-endian bytes."""
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "sample_index": self.sample_index,
            "token_ids": self.token_ids,
            "num_prompt_tokens": self.num_prompt_tokens,
            "rounds": self.rounds,
            "drafter_version": self.drafter_version,
            "target_digest": self.target_digest,
            "temperature": self.temperature,
        }
        arrays: list[FeatureArray] = [] if self.features is None else [*self.features]
        fields["shapes"] = [array.shape for array in arrays]
        return b"".join([json.dumps(fields).encode(), b"\n", *(array.astype("<f4").tobytes() for array in arrays)])

    @staticmethod
    def from_bytes(payload: bytes) -> Trajectory:
        """Return the trajectory `to_bytes` wrote.

        Raises:
            ValueError: The payload is not one.
        """
        line, newline, rest = payload.partition(b"\n")
        if not newline:
            raise ValueError("a trajectory starts with a line of JSON")
        fields = json.loads(line)
        try:
            shapes = fields.pop("shapes")
            fields["rounds"] = [RoundCounts(*counts) for counts in fields["rounds"]]
            features = _features_from_bytes(rest, shapes) if shapes else None
            return Trajectory(**fields, features=features)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a trajectory: {error}") from error


def _features_from_bytes(data: bytes, shapes: list[list[int]]) -> TrajectoryFeatures:
    arrays: list[FeatureArray] = []
    offset = 0
    for shape in shapes:
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(data, dtype="<f4", count=count, offset=offset).reshape(shape))
        offset += 4 * count
    return TrajectoryFeatures(*arrays)


class Position(NamedTuple):
    """Where a record ends: segment number, byte offset. Positions grow; (0, 0) is before everything."""

    segment: int
    offset: int


class Record(NamedTuple):
    """A trajectory and the position behind it, which acknowledges it."""

    trajectory: Trajectory
    end: Position


@dataclass
class SpoolCounters:
    """What the spool did since it was opened; `dropped_*` are trajectories that nobody will read.

    Attributes:
        num_written: Records on disk.
        dropped_full: The writer could not keep up.
        dropped_disk: The disk was full or failed.
        dropped_bytes: Oldest ones, beyond `max_bytes`.
        dropped_age: Older than `max_age_s`.
        num_corrupt: Segments whose end, or middle, could not be read.
        num_unreadable: Whole records that are no trajectory, as another release may have written them; counted at
            each read.
    """

    num_written: int = 0
    dropped_full: int = 0
    dropped_disk: int = 0
    dropped_bytes: int = 0
    dropped_age: int = 0
    num_corrupt: int = 0
    num_unreadable: int = 0


@dataclass
class _Segment:
    number: int
    path: Path
    num_bytes: int
    num_records: int
    started: float


class TrajectorySpool:
    """A bounded first-in-first-out store of trajectories in a directory. Thread-safe.

    Args:
        directory: Created when missing; one spool at a time may use it.
        max_bytes: Most bytes on disk; at least two segments.
        max_age_s: Segments begun earlier are dropped.
        segment_bytes: Size at which a segment is closed.
        clock: Seconds since the epoch; a jump backwards ages nothing.

    Raises:
        ConfigError: The directory cannot be made, or the bounds make no sense.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        max_age_s: float,
        segment_bytes: int = 4 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < 2 * segment_bytes:
            raise ConfigError(f"trajectory_spool_bytes={max_bytes} is invalid: must be >= {2 * segment_bytes}")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"trajectory_spool={str(directory)!r} cannot be used: {error}") from error
        self.counters = SpoolCounters()
        self._directory, self._clock = directory, clock
        self._max_bytes, self._max_age_s, self._segment_bytes = max_bytes, max_age_s, segment_bytes
        self._lock = threading.Lock()
        self._segments = [self._open(path) for path in sorted(directory.glob(f"*{_SUFFIX}"))]
        self._next_number = self._segments[-1].number + 1 if self._segments else 1
        self._is_disk_bad = False
        self._starts_new = False  # after a failure the last segment may be gone
        self._queue: queue.Queue[Trajectory | None] = queue.Queue(_QUEUE_SIZE)
        self._writer = threading.Thread(target=self._write_all, name="trajectory-spool", daemon=True)
        self._writer.start()

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        with self._lock:
            return sum(segment.num_bytes for segment in self._segments)

    @property
    def num_records(self) -> int:
        """Records on disk."""
        with self._lock:
            return sum(segment.num_records for segment in self._segments)

    def put(self, trajectory: Trajectory) -> bool:
        """Hand over a trajectory without waiting; False (and counted) when the writer is behind."""
        try:
            self._queue.put_nowait(trajectory)
        except queue.Full:
            self.counters.dropped_full += 1
            return False
        return True

    def flush(self) -> None:
        """Wait until everything handed over is on disk or counted as dropped."""
        self._queue.join()

    def close(self) -> None:
        """Write what was handed over, and stop."""
        self._queue.put(None)
        self._writer.join()

    def read(self, after: Position, max_records: int) -> list[Record]:
        """Return the oldest records behind `after`, at most `max_records`; a damaged segment ends early.

        A record that is no trajectory is passed over: it must not keep back those behind it.
        """
        records: list[Record] = []
        with self._lock:
            segments = [segment for segment in self._segments if segment.number >= after.segment]
        for segment in segments:
            end = start = after.offset if segment.number == after.segment else 0
            num_bytes = segment.num_bytes
            for payload, end in _read_payloads(segment.path, start, num_bytes):
                try:
                    trajectory = Trajectory.from_bytes(payload)
                except ValueError as error:
                    self.counters.num_unreadable += 1
                    logger.warning("a record is passed over path=%s offset=%d reason=%s", segment.path, end, error)
                    continue
                records.append(Record(trajectory, Position(segment.number, end)))
                if len(records) == max_records:
                    return records
            if end < num_bytes:
                self._cut(segment, end)
        return records

    def _cut(self, segment: _Segment, end: int) -> None:
        """Give up what lies behind a damaged record."""
        logger.warning("a spool segment is damaged, the rest is lost path=%s offset=%d", segment.path, end)
        with self._lock:
            self.counters.num_corrupt += 1
            segment.num_bytes = end

    def acknowledge(self, position: Position) -> None:
        """Delete the segments that end at or before `position`: their reader has them."""
        with self._lock:
            done = [s for s in self._segments if (s.number, s.num_bytes) <= position and s is not self._segments[-1]]
            for segment in done:
                self._remove(segment)

    # ---- the writer's thread ---------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            trajectory = self._queue.get()
            if trajectory is not None:
                self._write(trajectory)
            self._queue.task_done()
            if trajectory is None:
                return

    def _write(self, trajectory: Trajectory) -> None:
        payload = trajectory.to_bytes()
        record = _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload
        with self._lock:
            self._drop_old(len(record))
            try:
                segment = self._segment_for(len(record))
                _append(segment, record)
            except OSError as error:
                self.counters.dropped_disk += 1
                if not self._is_disk_bad:
                    logger.warning("trajectories are lost, the spool cannot be written reason=%s", error)
                self._is_disk_bad = True
                self._starts_new = True
                return
            self._is_disk_bad = False
            segment.num_bytes += len(record)
            segment.num_records += 1
            self.counters.num_written += 1

    def _segment_for(self, num_bytes: int) -> _Segment:
        last = self._segments[-1] if self._segments else None
        if last is not None and not self._starts_new and last.num_bytes + num_bytes <= self._segment_bytes:
            return last
        number = self._next_number
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{number:012d}{_SUFFIX}"
        path.touch()
        self._next_number += 1
        self._starts_new = False
        self._segments.append(_Segment(number, path, 0, 0, self._clock()))
        return self._segments[-1]

    def _drop_old(self, num_new_bytes: int) -> None:
        now = self._clock()
        while self._segments and now - self._segments[0].started > self._max_age_s:
            self.counters.dropped_age += self._remove(self._segments[0])
        while self._segments and sum(s.num_bytes for s in self._segments) + num_new_bytes > self._max_bytes:
            self.counters.dropped_bytes += self._remove(self._segments[0])

    def _remove(self, segment: _Segment) -> int:
        self._segments.remove(segment)
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a spool segment cannot be deleted path=%s reason=%s", segment.path, error)
        return segment.num_records

    def _open(self, path: Path) -> _Segment:
        """Index a segment of an earlier run; a damaged end is cut off, so that it can be appended to."""
        ends = [0, *(end for _, end in _read_payloads(path, 0, path.stat().st_size))]
        num_records, end = len(ends) - 1, ends[-1]
        if end < path.stat().st_size:
            self.counters.num_corrupt += 1
            logger.warning("a spool segment is damaged, the rest is lost path=%s offset=%d", path, end)
            with path.open("r+b") as file:
                file.truncate(end)
        return _Segment(int(path.stem), path, end, num_records, path.stat().st_mtime)


def _append(segment: _Segment, record: bytes) -> None:
    """Append a record; what a failed write leaves behind lies beyond the segment's end and is overwritten."""
    with segment.path.open("r+b", buffering=0) as file:
        file.seek(segment.num_bytes)
        if file.write(record) < len(record):
            raise OSError(errno.ENOSPC, "the disk is full")


def _read_payloads(path: Path, start: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield payloads and the offsets behind them until the first that is damaged."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            while file.tell() < end:
                header = file.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    return
                magic, size, checksum = _HEADER.unpack(header)
                if magic != _MAGIC or size > _MAX_RECORD_BYTES:
                    return
                payload = file.read(size)
                if len(payload) < size or zlib.crc32(payload) != checksum:
                    return
                yield payload, file.tell()
    except OSError as error:
        logger.warning("a spool segment cannot be read path=%s reason=%s", path, error)
