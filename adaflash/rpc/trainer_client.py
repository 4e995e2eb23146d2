# SPDX-License-Identifier: Apache-2.0
"""Client of a trainer for people and scripts: what versions there are, and which one the servers shall use."""

from __future__ import annotations

import uuid
from types import TracebackType
from typing import Any

import grpc

from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.rpc.pb import trainer_pb2_grpc
from adaflash.rpc.status import error_from_call
from adaflash.rpc.trainer_convert import TrainerStatus, report_to_pb, status_from_pb
from adaflash.rpc.version_client import RetryPolicy, TrainerAddress, open_channel
from adaflash.training.version_report import VersionReport


class TrainerClient:
    """Asks a trainer, and tells it; use it as `async with TrainerClient(trainer) as client`.

    Every method raises UnavailableError, RequestError or RpcError.

    Args:
        trainer: Where it is.
        timeout_s: How long a call may take.
    """

    def __init__(self, trainer: TrainerAddress, *, timeout_s: float = 60.0) -> None:
        self._channel = open_channel(trainer, RetryPolicy(), timeout_s)
        self._stub: Any = trainer_pb2_grpc.TrainerStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = () if trainer.token is None else (("authorization", f"Bearer {trainer.token}"),)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> TrainerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def status(self) -> TrainerStatus:
        """Return what the trainer has."""
        return status_from_pb(await self._call(self._stub.GetStatus, pb.GetTrainerStatusRequest()))

    async def activate(self, version: int) -> int:
        """Have an older version's weights published again; return their new number."""
        request = pb.ActivateVersionRequest(version=version, idempotency_key=uuid.uuid4().hex)
        reply: pb.ActivateVersionResponse = await self._call(self._stub.ActivateVersion, request)
        return reply.version

    async def report(self, report: VersionReport, server_id: str) -> None:
        """Tell the trainer of a version as a server does; a report of a bad one takes it from everyone."""
        await self._call(self._stub.ReportVersion, report_to_pb(report, server_id))

    async def _call(self, method: Any, request: object) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
