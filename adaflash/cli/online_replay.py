# SPDX-License-Identifier: Apache-2.0
"""What other drafters would have had accepted in a recorded session: the frozen one, and one trained the OSD way.

Greedy replies do not depend on the drafter, so the same replies are replayed with each, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from adaflash.cli.online_session import ActiveVersion, ServedRequest, SessionRecord
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.training.replay import ReplayResult, replay
from adaflash.training.supervision import Supervisor
from adaflash.training.trainer import Trainer
from adaflash.training.trainer_config import TrainerConfig
from adaflash.training.trainer_parts import load_parts, open_store
from adaflash.training.trajectories import Position, Trajectory, TrajectorySpool

# Online speculative decoding (arXiv:2310.07177): distillation by the forward KL alone.
OSD = {"loss": "forward_kl", "alpha": 0.0, "clip": "none", "weighting": "decay"}

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Acceptance:
    """Rounds, the tokens they emitted, and how many of them accepted a draft at each position."""

    num_rounds: int = 0
    num_emitted_tokens: int = 0
    num_accepted_per_position: tuple[int, ...] = ()

    @property
    def length(self) -> float:
        """Tokens emitted per round; NaN without rounds."""
        return self.num_emitted_tokens / self.num_rounds if self.num_rounds else math.nan

    @property
    def per_position(self) -> list[float]:
        """Share of the rounds that accepted a draft at each position."""
        return [count / max(1, self.num_rounds) for count in self.num_accepted_per_position]

    def __add__(self, other: Acceptance) -> Acceptance:
        counts = zip_longest(self.num_accepted_per_position, other.num_accepted_per_position, fillvalue=0)
        return Acceptance(
            self.num_rounds + other.num_rounds,
            self.num_emitted_tokens + other.num_emitted_tokens,
            tuple(a + b for a, b in counts),
        )


@dataclass(frozen=True)
class ReplayedRequest:
    """A reply of the session: what was accepted live, and what two other drafters would have had accepted."""

    request_id: str
    finished_s: float
    online: Acceptance
    frozen: Acceptance
    osd: Acceptance


def read_trajectories(spool: Path) -> dict[str, Trajectory]:
    """Return the trajectories a trainer received, by request; the trainer has ended."""
    opened = TrajectorySpool(spool, 1 << 50, math.inf)
    try:
        position, found = Position(0, 0), dict[str, Trajectory]()
        while records := opened.read(position, 64):
            found |= {record.trajectory.request_id: record.trajectory for record in records}
            position = records[-1].end
        return found
    finally:
        opened.close()


def replay_session(
    record: SessionRecord,
    trajectories: dict[str, Trajectory],
    config: TrainerConfig,
    directories: tuple[Path, Path],
    threshold: float,
    max_output_tokens: int,
    max_requests: int,
    on_progress: OnProgress,
) -> list[ReplayedRequest]:
    """Replay up to `max_requests` of a session's replies, evenly spread, in order.

    The OSD drafter takes as many optimizer steps on as many trajectories before each version as the live one took. It
    replays a reply with what it was when the newest version until then became active, so at times with a newer one
    than the reply was drafted by.

    Args:
        record: Of the session.
        trajectories: See `read_trajectories`.
        config: Of the session's trainer; its `store` is used for nothing but must not be in use.
        directories: Of target and drafter.
        threshold: Of the policy `confidence` that the session ran with.
        max_output_tokens: Limit of every reply.
        max_requests: Each takes about a second on two CPU cores.
        on_progress: Called with (replies done, replies in all).
    """
    ordered = [request for request in record.requests if request.request_id in trajectories]
    chosen = {request.request_id for request in ordered[:: max(1, math.ceil(len(ordered) / max_requests))]}
    frozen = load_parts(config, *directories)
    osd_config = replace(config, **OSD)  # type: ignore[arg-type]  # of its own fields
    osd_parts = load_parts(osd_config, *directories)
    store = open_store(osd_config, directories[1], osd_parts.target_digest)
    osd = Trainer(osd_config, osd_parts, store)
    replayed: list[ReplayedRequest] = []
    try:
        num_added, versions = 0, list(record.versions)
        for number, request in enumerate(ordered):
            newest = max(request.versions, default=0)
            while versions and versions[0].version <= newest:
                version = versions.pop(0)
                num_added = _train(osd, version, ordered, trajectories, num_added)
            if request.request_id in chosen:
                trajectory = trajectories[request.request_id]
                replayed.append(
                    ReplayedRequest(
                        request.request_id,
                        request.finished_s,
                        live_acceptance(trajectory),
                        *(
                            _replay(parts.learner.drafter, frozen.supervisor, trajectory, threshold, max_output_tokens)
                            for parts in (frozen, osd_parts)
                        ),
                    )
                )
            on_progress(number + 1, len(ordered))
    finally:
        store.close()
    return replayed


def _train(
    osd: Trainer,
    version: ActiveVersion,
    ordered: list[ServedRequest],
    trajectories: dict[str, Trajectory],
    num_added: int,
) -> int:
    """Bring a trainer to where the live one was when it published a version; return the trajectories it has now."""
    for request in ordered[num_added : version.num_trajectories]:
        osd.add(trajectories[request.request_id])
    while osd.status.train_step < version.train_step:
        osd.step()
    return max(num_added, version.num_trajectories)


def live_acceptance(trajectory: Trajectory) -> Acceptance:
    """Return what was accepted while a trajectory was served."""
    width = max((counts.num_accepted for counts in trajectory.rounds), default=0)
    return Acceptance(
        len(trajectory.rounds),
        len(trajectory.token_ids) - trajectory.num_prompt_tokens - 1,  # the first one came with the prompt
        tuple(sum(counts.num_accepted > k for counts in trajectory.rounds) for k in range(width)),
    )


def _replay(
    drafter: DFlashDrafter,
    supervisor: Supervisor,
    trajectory: Trajectory,
    threshold: float,
    max_output_tokens: int,
) -> Acceptance:
    supervision = supervisor.supervise(trajectory)
    result: ReplayResult = replay(
        drafter,
        supervision.sequence,
        supervision.taps.float(),
        threshold=threshold,
        max_output_tokens=max_output_tokens,
    )
    return Acceptance(result.num_rounds, result.num_emitted_tokens, result.num_accepted_per_position)
