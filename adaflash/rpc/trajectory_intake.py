# SPDX-License-Identifier: Apache-2.0
"""What a trainer does with a trajectory that arrives: checks it, takes it once, and counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Literal, Protocol, TypeAlias

from adaflash.errors import RequestError
from adaflash.rpc import trainer_convert as convert
from adaflash.rpc.pb import trainer_pb2 as pb
from adaflash.training.record_ids import RecordIds
from adaflash.training.trajectories import Trajectory

Outcome: TypeAlias = Literal["accepted", "duplicate", "dropped"]


class TrajectorySink(Protocol):
    """Where trajectories go, e.g. a TrajectorySpool."""

    def take(self, trajectory: Trajectory) -> bool:
        """Keep a trajectory, so that a kill does not lose it; False when that failed. Called in threads, may wait."""

    def record_ids(self) -> Iterable[str]:
        """Return the ids of those kept, of earlier runs too, oldest first."""


class TrajectoryIntake:
    """Passes trajectories to a sink, each one once, however often it is sent.

    Args:
        sink: Takes them; its ids are read here.
        target_digest: Of the target that is trained for; trajectories of another one are invalid.

    Attributes:
        total: What became of all trajectories since the start.
    """

    def __init__(self, sink: TrajectorySink, target_digest: str) -> None:
        self._sink, self._target_digest = sink, target_digest
        self._lock = threading.Lock()
        self._taken = RecordIds(sink.record_ids())
        self.total = pb.SubmitTrajectoriesResponse()

    async def take_all(self, messages: AsyncIterator[pb.TrajectoryRecord]) -> pb.SubmitTrajectoriesResponse:
        """Take a stream; an invalid trajectory is counted, and the others are taken."""
        reply = pb.SubmitTrajectoriesResponse()
        try:
            async for message in messages:
                await self._count(reply, message)
        finally:
            self._add_to_total(reply)  # what was taken counts, whether its sender hears of it or not
        return reply

    async def _count(self, reply: pb.SubmitTrajectoriesResponse, message: pb.TrajectoryRecord) -> None:
        reply.num_received += 1
        try:
            outcome = await asyncio.to_thread(self._take, message)
        except RequestError as error:
            reply.num_invalid += 1
            reply.first_invalid = reply.first_invalid or str(error)
            return
        if outcome == "accepted":
            reply.num_accepted += 1
        elif outcome == "duplicate":
            reply.num_duplicate += 1
        else:
            reply.num_dropped += 1

    def _take(self, message: pb.TrajectoryRecord) -> Outcome:
        if message.target_digest != self._target_digest:
            raise RequestError("target_digest", message.target_digest, f"{self._target_digest}, the target trained for")
        trajectory = convert.trajectory_from_pb(message)
        # The lock spans the sink: of two streams with the same trajectory, one waits to hear whether it was kept.
        with self._lock:
            if trajectory.record_id in self._taken:
                return "duplicate"
            if not self._sink.take(trajectory):
                return "dropped"
            self._taken.add(trajectory.record_id)
            return "accepted"

    def _add_to_total(self, reply: pb.SubmitTrajectoriesResponse) -> None:
        total = self.total
        total.num_received += reply.num_received
        total.num_accepted += reply.num_accepted
        total.num_dropped += reply.num_dropped
        total.num_invalid += reply.num_invalid
        total.num_duplicate += reply.num_duplicate
        total.first_invalid = total.first_invalid or reply.first_invalid
