# SPDX-License-Identifier: Apache-2.0
"""What a served sample teaches, and the spool that keeps such trajectories on disk until a trainer has them.

The spool is a directory of append-only segments, written by its own thread: `put` only hands over. It is bounded in
bytes and age (whole segments are dropped, oldest first), survives restarts, and neither a full disk nor a damaged file
raises into serving: what is lost is counted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaflash.errors import ConfigError
from adaflash.training.spool_segment import (
    Buffer,
    DamagedSegmentError,
    Segment,
    SegmentReader,
    count_records,
    open_segment,
    record_size,
)

logger = logging.getLogger(__name__)

FeatureArray = npt.NDArray[np.float32]

_SUFFIX = ".spool"
_QUEUE_SIZE = 256
_DAMAGED = "a spool segment is damaged, the rest is lost path=%s offset=%d reason=%s"


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
        record_id: Unique among all servers, so that a trainer recognises what it is sent twice.
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
    record_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def to_buffers(self) -> list[Buffer]:
        """Return the record's payload in parts: a JSON line, then the arrays' own little-endian bytes, not copied."""
        names = [one.name for one in dataclasses.fields(self) if one.name != "features"]
        fields: dict[str, object] = {name: getattr(self, name) for name in names}
        arrays: list[FeatureArray] = [] if self.features is None else [*self.features]
        fields["shapes"] = [array.shape for array in arrays]
        return [json.dumps(fields).encode() + b"\n", *(_bytes_of(array) for array in arrays)]

    @staticmethod
    def from_bytes(payload: bytes) -> Trajectory:
        """Return the trajectory of `to_buffers`, joined; its arrays are views of `payload`.

        Raises:
            ValueError: The payload is not one.
        """
        line_end = payload.find(b"\n") + 1
        if not line_end:
            raise ValueError("a trajectory starts with a line of JSON")
        fields = json.loads(payload[:line_end])
        try:
            shapes = fields.pop("shapes")
            fields["rounds"] = [RoundCounts(*counts) for counts in fields["rounds"]]
            features = _features_from_bytes(payload, line_end, shapes) if shapes else None
            # Records of earlier releases have none; the same record must get the same one at each read.
            fields.setdefault("record_id", hashlib.sha256(payload).hexdigest()[:32])
            return Trajectory(**fields, features=features)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a trajectory: {error}") from error


def _bytes_of(array: FeatureArray) -> memoryview:
    return np.ascontiguousarray(array, "<f4").reshape(-1).view(np.uint8).data


def _features_from_bytes(payload: bytes, offset: int, shapes: list[list[int]]) -> TrajectoryFeatures:
    arrays: list[FeatureArray] = []
    for shape in shapes:
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(payload, dtype="<f4", count=count, offset=offset).reshape(shape))
        offset += 4 * count
    return TrajectoryFeatures(*arrays)


class Position(NamedTuple):
    """Where a record ends: segment number, byte offset. Positions grow; (0, 0) is before everything."""

    segment: int
    offset: int


START = Position(0, 0)


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
        self.directory, self._clock = directory, clock
        self._max_bytes, self._max_age_s, self._segment_bytes = max_bytes, max_age_s, segment_bytes
        self._lock = threading.Lock()
        self._segments = [self._open(path) for path in sorted(directory.glob(f"*{_SUFFIX}"))]
        self._next_number = self._segments[-1].number + 1 if self._segments else 1
        self._acknowledged = START
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

    @property
    def end(self) -> Position:
        """Behind the newest record on disk."""
        with self._lock:
            last = self._segments[-1] if self._segments else None
            return START if last is None else Position(last.number, last.num_bytes)

    def put(self, trajectory: Trajectory) -> bool:
        """Hand over a trajectory without waiting; False (and counted) when the writer is behind."""
        try:
            self._queue.put_nowait(trajectory)
        except queue.Full:
            self.counters.dropped_full += 1
            return False
        return True

    def take(self, trajectory: Trajectory) -> bool:
        """Write a trajectory before returning, so that a kill does not lose it; False (and counted) when it failed."""
        return self._write(trajectory)

    def flush(self) -> None:
        """Wait until everything handed over is on disk or counted as dropped."""
        self._queue.join()

    def close(self) -> None:
        """Write what was handed over, and stop."""
        self._queue.put(None)
        self._writer.join()

    def read(self, after: Position, max_records: int, max_bytes: int | None = None) -> list[Record]:
        """Return the oldest records behind `after`; a damaged segment ends early.

        A record that is no trajectory is passed over: it must not keep back those behind it.

        Args:
            after: Position of the last record had; START for none.
            max_records: Most records returned.
            max_bytes: Most bytes they may have on disk, unless the first alone has more.
        """
        records: list[Record] = []
        num_bytes = 0
        for segment in self._segments_from(after):
            with self._reading(segment, after) as reader:
                while (size := reader.next_size()) is not None:
                    num_bytes += size
                    if records and (len(records) == max_records or (max_bytes is not None and num_bytes > max_bytes)):
                        return records
                    trajectory = self._parse(reader.read(size), segment)
                    if trajectory is not None:
                        records.append(Record(trajectory, Position(segment.number, reader.offset)))
        return records

    def record_ids(self) -> Iterator[str]:
        """Yield the ids of the records on disk, oldest first."""
        for segment in self._segments_from(START):
            with self._reading(segment, START) as reader:
                while (size := reader.next_size()) is not None:
                    record_id = _record_id_in(reader.read_line(size))
                    if record_id is not None:
                        reader.skip(size)
                        yield record_id
                    elif (trajectory := self._parse(reader.read(size), segment)) is not None:
                        yield trajectory.record_id

    def _segments_from(self, position: Position) -> list[Segment]:
        with self._lock:
            return [segment for segment in self._segments if segment.number >= position.segment]

    @contextmanager
    def _reading(self, segment: Segment, after: Position) -> Iterator[SegmentReader]:
        """Read what lies behind a position; damage ends the block, and the segment."""
        start = after.offset if segment.number == after.segment else 0
        with SegmentReader(segment.path, start, segment.num_bytes) as reader:
            try:
                yield reader
            except DamagedSegmentError as error:
                self._cut(segment, reader.offset, error)

    def _parse(self, payload: bytes, segment: Segment) -> Trajectory | None:
        try:
            return Trajectory.from_bytes(payload)
        except ValueError as error:
            self.counters.num_unreadable += 1
            logger.warning("a record is passed over path=%s reason=%s", segment.path, error)
            return None

    def _cut(self, segment: Segment, end: int, error: DamagedSegmentError) -> None:
        """Give up what lies behind a damaged record."""
        with self._lock:
            if segment not in self._segments:
                return  # it was dropped while it was read
            self.counters.num_corrupt += 1
            segment.num_bytes = end
        logger.warning(_DAMAGED, segment.path, end, error)

    def acknowledge(self, position: Position) -> None:
        """Delete the segments that end at or before `position`: their reader has them."""
        with self._lock:
            self._acknowledged = max(self._acknowledged, position)
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

    def _write(self, trajectory: Trajectory) -> bool:
        payload = trajectory.to_buffers()
        size = record_size(payload)
        with self._lock:
            self._drop_old(size)
            try:
                self._segment_for(size).append(payload)
            except OSError as error:
                self.counters.dropped_disk += 1
                if not self._is_disk_bad:
                    logger.warning("trajectories are lost, the spool cannot be written reason=%s", error)
                self._is_disk_bad = True
                self._starts_new = True
                return False
            self._is_disk_bad = False
            self.counters.num_written += 1
            return True

    def _segment_for(self, num_bytes: int) -> Segment:
        last = self._segments[-1] if self._segments else None
        if last is None or (last.num_bytes and (self._starts_new or last.num_bytes + num_bytes > self._segment_bytes)):
            path = self.directory / f"{self._next_number:012d}{_SUFFIX}"
            last = Segment(self._next_number, path, 0, 0, self._clock())
            self._next_number += 1
            self._segments.append(last)
        if not last.num_bytes:  # perhaps one that failed before: a disk that stays full gets no more of them
            self.directory.mkdir(parents=True, exist_ok=True)
            last.path.touch()
            last.started = self._clock()
        self._starts_new = False
        return last

    def _drop_old(self, num_new_bytes: int) -> None:
        now = self._clock()
        while self._segments and now - self._segments[0].started > self._max_age_s:
            self.counters.dropped_age += self._drop(self._segments[0])
        while self._segments and sum(s.num_bytes for s in self._segments) + num_new_bytes > self._max_bytes:
            self.counters.dropped_bytes += self._drop(self._segments[0])

    def _drop(self, segment: Segment) -> int:
        """Remove a segment and return how many of its records their reader has not acknowledged."""
        done = self._acknowledged
        num_records = segment.num_records if done.segment < segment.number else count_records(segment, done.offset)
        self._remove(segment)
        return num_records

    def _remove(self, segment: Segment) -> None:
        self._segments.remove(segment)
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a spool segment cannot be deleted path=%s reason=%s", segment.path, error)

    def _open(self, path: Path) -> Segment:
        segment, damage = open_segment(path)
        if damage is not None:
            self.counters.num_corrupt += 1
            logger.warning(_DAMAGED, path, segment.num_bytes, damage)
        return segment


def _record_id_in(line: bytes) -> str | None:
    """Return the id in the first line of a payload; None when it has none."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    record_id = fields.get("record_id") if isinstance(fields, dict) else None
    return record_id if isinstance(record_id, str) else None
