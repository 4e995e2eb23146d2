# SPDX-License-Identifier: Apache-2.0
"""Sends reports about versions to the trainer, in order, until each has arrived."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc

from adaflash.rpc.backoff import Backoff
from adaflash.rpc.pb import trainer_pb2_grpc
from adaflash.rpc.trainer_convert import report_to_pb
from adaflash.training.version_report import VersionReport

logger = logging.getLogger(__name__)

MAX_WAITING = 256
# What sending the same again cannot cure.
_FINAL_CODES = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED})


class ReportSender:
    """Queues reports and sends them while `run` runs; the oldest of more than MAX_WAITING is dropped.

    Args:
        stub: Of the trainer.
        metadata: Sent with every call.
        server_id: Who reports.
        timeout_s: Of one attempt.
        backoff: Between attempts.
    """

    def __init__(
        self,
        stub: trainer_pb2_grpc.TrainerStub,
        metadata: Sequence[tuple[str, str]],
        server_id: str,
        timeout_s: float,
        backoff: Backoff,
    ) -> None:
        self._stub: Any = stub  # generated without types
        self._metadata, self._server_id = metadata, server_id
        self._timeout_s, self._backoff = timeout_s, backoff
        self._waiting: deque[VersionReport] = deque()
        self._added = asyncio.Event()

    def put(self, report: VersionReport) -> None:
        """Queue a report; call in the event loop of `run`."""
        if len(self._waiting) == MAX_WAITING:
            logger.warning("a version report is dropped, the trainer takes none event=%s", self._waiting[0].event)
            self._waiting.popleft()
        self._waiting.append(report)
        self._added.set()

    async def run(self) -> None:
        """Send reports for ever."""
        while True:
            while self._waiting:
                report = self._waiting[0]
                is_done = await self._send(report)
                if is_done and self._waiting and self._waiting[0] is report:
                    self._waiting.popleft()
            self._added.clear()
            await self._added.wait()

    async def _send(self, report: VersionReport) -> bool:
        """Try once, and return whether there is nothing left to do; waits after a failure."""
        request = report_to_pb(report, self._server_id)
        try:
            await self._stub.ReportVersion(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() in _FINAL_CODES:
                logger.warning("the trainer refuses a version report event=%s reason=%s", report.event, error.details())
                return True
            await self._backoff.wait()
            return False
        self._backoff.reset()
        return True
