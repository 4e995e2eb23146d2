# SPDX-License-Identifier: Apache-2.0
"""One file of a spool: records one after the other, each with its size and checksum, so that a torn end is found."""

from __future__ import annotations

import contextlib
import errno
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeAlias

Buffer: TypeAlias = "bytes | memoryview"

_MAGIC = b"AFTR"
_HEADER = struct.Struct("<4sII")  # magic, payload bytes, crc32 of the payload
_MAX_PAYLOAD_BYTES = 1 << 30


class DamagedSegmentError(Exception):
    """What follows in a segment is no record; whatever lies behind it is lost."""


def record_size(payload: Sequence[Buffer]) -> int:
    """Return the bytes a record of this payload takes on disk."""
    return _HEADER.size + sum(len(buffer) for buffer in payload)


@dataclass
class Segment:
    """A file of records.

    Attributes:
        number: Segments are read in this order.
        path: The file.
        num_bytes: Where its last record ends; what lies behind it in the file is the rest of a write that failed.
        num_records: Records in it.
        started: When it was begun, in seconds since the epoch.
    """

    number: int
    path: Path
    num_bytes: int
    num_records: int
    started: float

    def append(self, payload: Sequence[Buffer]) -> None:
        """Append a record; what a failed write left behind the end is overwritten.

        The buffers are neither joined nor copied: checksum and writes let other threads run.

        Args:
            payload: Its parts, as bytes.

        Raises:
            OSError: The disk is full or failed; the segment is what it was.
        """
        checksum = 0
        for buffer in payload:
            checksum = zlib.crc32(buffer, checksum)
        size = record_size(payload)
        header = _HEADER.pack(_MAGIC, size - _HEADER.size, checksum)
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self.num_bytes)
            for buffer in (header, *payload):
                if file.write(buffer) < len(buffer):
                    raise OSError(errno.ENOSPC, "the disk is full")
        self.num_bytes += size
        self.num_records += 1


class SegmentReader:
    """Reads a segment's payloads from one record's end to another's; use it as `with SegmentReader(...)`.

    Args:
        path: The segment's file.
        start: Where a record begins.
        end: Where the last one ends.

    Attributes:
        offset: Behind the last record read.
    """

    def __init__(self, path: Path, start: int, end: int) -> None:
        self._path, self.offset, self._end = path, start, end
        self._file: BinaryIO | None = None
        self._checksum = 0

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def next_size(self) -> int | None:
        """Return the size of the next payload, None at the end.

        Raises:
            DamagedSegmentError: No record follows.
        """
        if self.offset >= self._end:
            return None
        header = self._read_at(self.offset, _HEADER.size)
        magic, size, self._checksum = _HEADER.unpack(header)
        if magic != _MAGIC or size > _MAX_PAYLOAD_BYTES:
            raise DamagedSegmentError("no record begins here")
        return int(size)

    def read(self, size: int) -> bytes:
        """Return the payload whose size `next_size` just told, and go on to the next.

        Raises:
            DamagedSegmentError: It is not what was written.
        """
        payload = self._read_at(self.offset + _HEADER.size, size)
        if zlib.crc32(payload) != self._checksum:
            raise DamagedSegmentError("a payload has another checksum")
        self.skip(size)
        return payload

    def read_line(self, size: int) -> bytes:
        """Return the first line of the payload whose size `next_size` just told; nothing is verified."""
        try:
            return self._file_at(self.offset + _HEADER.size).readline(size)
        except OSError as error:
            raise DamagedSegmentError(str(error)) from error

    def skip(self, size: int) -> None:
        """Go on to the record behind the payload whose size `next_size` just told."""
        self.offset += _HEADER.size + size

    def _read_at(self, offset: int, size: int) -> bytes:
        try:
            data = self._file_at(offset).read(size)
        except OSError as error:
            raise DamagedSegmentError(str(error)) from error
        if len(data) < size:
            raise DamagedSegmentError("the file ends within a record")
        return data

    def _file_at(self, offset: int) -> BinaryIO:
        if self._file is None:
            self._file = self._path.open("rb")
        self._file.seek(offset)
        return self._file


def count_records(segment: Segment, start: int) -> int:
    """Return how many records lie behind `start`, where one begins; damage ends the count."""
    num_records = 0
    with SegmentReader(segment.path, start, segment.num_bytes) as reader, contextlib.suppress(DamagedSegmentError):
        while (size := reader.next_size()) is not None:
            reader.skip(size)
            num_records += 1
    return num_records


def open_segment(path: Path) -> tuple[Segment, DamagedSegmentError | None]:
    """Index a segment of an earlier run; a damaged end is cut off, so that it can be appended to.

    Returns:
        The segment, and what was wrong with it.

    Raises:
        OSError: The disk failed.
    """
    info = path.stat()
    damage: DamagedSegmentError | None = None
    num_records = 0
    with SegmentReader(path, 0, info.st_size) as reader:
        try:
            while (size := reader.next_size()) is not None:
                reader.read(size)
                num_records += 1
        except DamagedSegmentError as error:
            damage = error
    if damage is not None:
        with path.open("r+b") as file:
            file.truncate(reader.offset)
    return Segment(int(path.stem), path, reader.offset, num_records, info.st_mtime), damage
