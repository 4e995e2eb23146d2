# SPDX-License-Identifier: Apache-2.0
"""Fetches one version from a trainer into a staging area, going on where an earlier attempt broke off.

A chunk is asked for when the one before is on disk, so that a break at any point, at either end, costs one chunk.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from adaflash.durable_files import hash_file
from adaflash.errors import PayloadError, WeightError
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.pb import trainer_pb2_grpc
from adaflash.rpc.trainer_convert import VersionOffer
from adaflash.training.delta import apply_delta
from adaflash.training.manifest import (
    CONFIG_FILE,
    DELTA_FILE,
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    MODEL_FILE,
    FileInfo,
    Manifest,
)
from adaflash.training.payload import PayloadChecker
from adaflash.training.staging import StagedVersion, StagingArea

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metadata = Sequence[tuple[str, str]]

_PART = ".part"


class ChunkError(WeightError):
    """What a trainer sent is not the part of the file that was asked for."""


class MismatchError(WeightError):
    """A file that arrived is not the one that was published; what there was of it has been removed."""


@dataclass(frozen=True)
class ClientTimeouts:
    """How long each state of a client may take, in seconds.

    Attributes:
        connect_s: Until the trainer accepts the subscription.
        chunk_s: One chunk, from the request until it is on disk.
        verify_s: Hashing, rebuilding or checking the files of a version, each.
        handover_s: What is done with a version.
        report_s: One report.
    """

    connect_s: float = 10.0
    chunk_s: float = 30.0
    verify_s: float = 900.0
    handover_s: float = 900.0
    report_s: float = 10.0


class VersionFetcher:
    """Fetches versions over one channel, one at a time.

    Args:
        stub: Of the trainer.
        metadata: Sent with every call.
        staging: Where files go.
        checker: Refuses what does not fit.
        timeouts: Limits.
        chunk_bytes: Size of a chunk, at most 1 MiB.

    Attributes:
        num_bytes_received: Bytes of chunks that arrived and were right, since the start.
    """

    def __init__(
        self,
        stub: trainer_pb2_grpc.TrainerStub,
        metadata: Metadata,
        staging: StagingArea,
        checker: PayloadChecker,
        timeouts: ClientTimeouts,
        chunk_bytes: int,
    ) -> None:
        self._stub: Any = stub  # generated without types
        self._metadata, self._staging, self._checker = metadata, staging, checker
        self._timeouts, self._chunk_bytes = timeouts, chunk_bytes
        self.num_bytes_received = 0

    async def fetch(self, offer: VersionOffer) -> StagedVersion:
        """Return the version on offer, fetched, checked and committed; if it is staged already, checked again.

        Raises:
            PayloadError: It does not fit the drafter being served.
            ChunkError: The trainer sent something else than was asked for.
            MismatchError: A file arrived whole, and is not the one published.
            AioRpcError: The call failed.
            TimeoutError: A step took too long.
            OSError: The disk is full or failed.
        """
        self._checker.check_offer(offer.target_digest, offer.layout_signature, offer.num_bytes)
        if offer.manifest_size > MAX_MANIFEST_BYTES:
            raise PayloadError(f"{MANIFEST_FILE} has {offer.manifest_size} bytes: at most {MAX_MANIFEST_BYTES}")
        staged = await self._recheck(offer)
        if staged is not None:
            return staged
        directory = await self._in_thread(self._staging.incoming, offer.version, offer.manifest_sha256)
        await self._fetch_file(offer.version, directory, _manifest_info(offer))
        manifest = self._read_manifest(directory, offer)
        self._checker.check_manifest(manifest)
        await self._fetch_file(offer.version, directory, manifest.file(CONFIG_FILE))
        if not await self._rebuild(directory, manifest):
            await self._fetch_file(offer.version, directory, manifest.file(MODEL_FILE))
        await self._in_thread(self._checker.check, directory, manifest)
        return await self._in_thread(self._staging.commit, directory, manifest)

    async def _recheck(self, offer: VersionOffer) -> StagedVersion | None:
        """Return the version if it is staged already and as good as it was."""
        stored = self._staging.find(offer.version)
        if stored is None or stored.manifest_sha256 != offer.manifest_sha256:
            return None
        try:
            await self._in_thread(self._checker.check, stored.directory, stored.manifest)
        except PayloadError as error:
            logger.warning("a staged version is fetched again version=%d reason=%s", offer.version, error)
            await self._in_thread(self._staging.discard, offer.version)
            return None
        return StagedVersion(offer.version, stored.directory, stored.manifest)

    def _read_manifest(self, directory: Path, offer: VersionOffer) -> Manifest:
        try:
            manifest = Manifest.from_json((directory / MANIFEST_FILE).read_bytes(), MANIFEST_FILE)
        except WeightError as error:
            raise PayloadError(str(error)) from error
        if manifest.version != offer.version:
            raise PayloadError(f"{MANIFEST_FILE}: version={manifest.version} was announced as {offer.version}")
        return manifest

    async def _rebuild(self, directory: Path, manifest: Manifest) -> bool:
        """Make the weights from those of an earlier version and the difference; False when that cannot be done."""
        if manifest.base_sha256 is None or manifest.base_version is None or any(directory.glob(f"{MODEL_FILE}*")):
            return False  # no difference, or an earlier attempt began to fetch the whole
        base = self._staging.find(manifest.base_version)
        if base is None or base.manifest.file(MODEL_FILE).sha256 != manifest.base_sha256:
            return False
        await self._fetch_file(manifest.version, directory, manifest.file(DELTA_FILE))
        delta, model, base_file = directory / DELTA_FILE, manifest.file(MODEL_FILE), base.directory / MODEL_FILE
        part = directory / (MODEL_FILE + _PART)
        try:
            await self._in_thread(apply_delta, base_file, manifest.base_sha256, delta, part, model.size, model.sha256)
        except PayloadError as error:
            logger.warning("the whole version is fetched version=%d reason=%s", manifest.version, error)
            return False
        finally:
            delta.unlink()
        part.rename(directory / MODEL_FILE)
        return True

    async def _fetch_file(self, version: int, directory: Path, info: FileInfo) -> None:
        """Have a file in `directory`, with the size and sha256 it must have."""
        path, part = directory / info.name, directory / (info.name + _PART)
        if path.exists():
            path.rename(part)  # of an earlier attempt; hashed again
        part.touch()
        await self._fill(version, part, info)
        sha256 = await self._in_thread(hash_file, part)
        if sha256 != info.sha256:
            part.unlink()
            raise MismatchError(f"{info.name} of version {version} has sha256 {sha256}: must have {info.sha256}")
        part.rename(path)

    async def _fill(self, version: int, part: Path, info: FileInfo) -> None:
        offset = part.stat().st_size
        if offset > info.size:
            part.unlink()
            raise MismatchError(f"{info.name} of version {version} has {offset} bytes here: must have {info.size}")
        if offset:
            logger.info("fetch goes on version=%d file=%s offset=%d of=%d", version, info.name, offset, info.size)
        while offset < info.size:
            request = pb.FetchVersionRequest(
                version=version, file=info.name, offset=offset, max_bytes=min(self._chunk_bytes, info.size - offset)
            )
            offset += await asyncio.wait_for(self._fetch_chunk(request, part), self._timeouts.chunk_s)

    async def _fetch_chunk(self, request: pb.FetchVersionRequest, part: Path) -> int:
        """Write what one call yields to `part`, and return how many bytes that was."""
        call = self._stub.FetchVersion(request, metadata=self._metadata)
        num_bytes = 0
        try:
            async for chunk in call:
                _check_chunk(chunk, request, num_bytes)
                await asyncio.to_thread(_write_at, part, chunk.offset, chunk.data)
                num_bytes += len(chunk.data)
                self.num_bytes_received += len(chunk.data)
        finally:
            call.cancel()
        if not num_bytes:
            raise ChunkError(f"{request.file} of version {request.version}: nothing came at offset {request.offset}")
        return num_bytes

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.wait_for(asyncio.to_thread(function, *args), self._timeouts.verify_s)


def _manifest_info(offer: VersionOffer) -> FileInfo:
    return FileInfo(MANIFEST_FILE, offer.manifest_size, offer.manifest_sha256)


def _check_chunk(chunk: pb.FileChunk, request: pb.FetchVersionRequest, num_bytes: int) -> None:
    where = f"{request.file} of version {request.version}"
    offset, left = request.offset + num_bytes, request.max_bytes - num_bytes
    if chunk.offset != offset or not 0 < len(chunk.data) <= left:
        got = f"{len(chunk.data)} bytes at offset {chunk.offset}"
        raise ChunkError(f"{where}: {got} came: must be 1 to {left} at {offset}")
    if zlib.crc32(chunk.data) != chunk.crc32:
        raise ChunkError(f"{where}: the {len(chunk.data)} bytes at offset {offset} have another crc32 than was sent")


def _write_at(path: Path, offset: int, data: bytes) -> None:
    """Write at an offset rather than append: a late write of a cancelled attempt then changes nothing."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)
