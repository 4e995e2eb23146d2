# SPDX-License-Identifier: Apache-2.0
"""The trajectories in memory that a trainer draws from: recent ones mostly, and a share of all.

How much may be trained is a budget in anchors: a trajectory that comes in brings its response tokens times the epochs
wanted, a step spends what it used. So an idle window is not learned by heart, whatever its size.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass

import torch

from adaflash.training.supervision import SkippedTrajectoryError, Supervision, Supervisor
from adaflash.training.trajectories import Trajectory


@dataclass(eq=False)
class _Entry:
    """A trajectory, and what the target says about it once it was drawn for the first time."""

    trajectory: Trajectory | None
    supervision: Supervision | None
    num_tokens: int
    num_eligible: int


@dataclass
class WindowBudget:
    """What may still be trained; part of a trainer's state.

    Attributes:
        credit: Anchors.
        new_tokens: Response tokens that came since training paused.
        is_training: Whether training goes on, until the credit is used up.
    """

    credit: float = 0.0
    new_tokens: int = 0
    is_training: bool = False


class ReplayWindow:
    """A bounded first-in-first-out window, drawn from at random.

    Args:
        supervisor: Checks trajectories and gets their features.
        max_tokens: Tokens in memory, one trajectory at least.
        replay_share: Share of draws in which age does not matter.
        recency_tokens: Tokens that came later, after which a trajectory is drawn half as often in the others.

    Attributes:
        skipped: Trajectories passed over, by reason.
        num_added: Trajectories taken.
        num_tokens: Tokens in the window.
    """

    def __init__(self, supervisor: Supervisor, max_tokens: int, replay_share: float, recency_tokens: int) -> None:
        self._supervisor, self._max_tokens = supervisor, max_tokens
        self._replay_share, self._recency_tokens = replay_share, recency_tokens
        self._entries: deque[_Entry] = deque()
        self.skipped: Counter[str] = Counter()
        self.num_added = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, trajectory: Trajectory) -> int:
        """Take a trajectory as the newest one and return its eligible anchors; 0 when it is skipped, and counted.

        An anchor is a response token whose next token is in the response, too.
        """
        try:
            self._supervisor.check(trajectory)
        except SkippedTrajectoryError as error:
            self.skipped[error.reason] += 1
            return 0
        num_tokens = len(trajectory.token_ids)
        num_eligible = num_tokens - trajectory.num_prompt_tokens - 1
        self._entries.append(_Entry(trajectory, None, num_tokens, num_eligible))
        self.num_tokens += num_tokens
        self.num_added += 1
        while self.num_tokens > self._max_tokens and len(self._entries) > 1:
            self.num_tokens -= self._entries.popleft().num_tokens
        return num_eligible

    def draw(self, count: int, generator: torch.Generator) -> list[Supervision]:
        """Draw up to `count` different trajectories; the generator's state and what is in the window decide.

        One whose features turn out to be unusable is dropped and counted, and another is drawn.
        """
        drawn: list[_Entry] = []
        while len(drawn) < count:
            left = [entry for entry in self._entries if entry not in drawn]
            if not left:
                break
            entry = left[self._choose(left, generator)]
            if self._supervise(entry):
                drawn.append(entry)
        return [entry.supervision for entry in drawn if entry.supervision is not None]

    def _choose(self, entries: list[_Entry], generator: torch.Generator) -> int:
        """Return the index of an entry; each of its anchors is as likely as those of others of its age."""
        any_age = torch.rand((), generator=generator, dtype=torch.float64) < self._replay_share
        weights = torch.tensor([float(entry.num_eligible) for entry in entries], dtype=torch.float64)
        if not any_age:
            tokens = torch.tensor([float(entry.num_tokens) for entry in entries], dtype=torch.float64)
            later = tokens.flip(0).cumsum(0).flip(0) - tokens
            weights = weights * torch.exp(-later * (math.log(2) / self._recency_tokens)).clamp_min(1e-300)
        return int(torch.multinomial(weights, 1, generator=generator))

    def _supervise(self, entry: _Entry) -> bool:
        if entry.supervision is not None:
            return True
        assert entry.trajectory is not None, "an entry without features has its trajectory"
        try:
            entry.supervision = self._supervisor.supervise(entry.trajectory)
        except SkippedTrajectoryError as error:
            self.skipped[error.reason] += 1
            self._entries.remove(entry)
            self.num_tokens -= entry.num_tokens
            return False
        entry.trajectory = None  # The features are held once.
        return True


class AnchorBudget:
    """Decides when to train and when to pause.

    Args:
        state: What is left, changed in place.
        min_tokens: Response tokens that end a pause.
        max_epochs: Anchors that a response token brings.
    """

    def __init__(self, state: WindowBudget, min_tokens: int, max_epochs: float) -> None:
        self.state, self._min_tokens, self._max_epochs = state, min_tokens, max_epochs

    def grant(self, num_eligible: int) -> None:
        """Count what a trajectory brought."""
        self.state.credit += num_eligible * self._max_epochs
        self.state.new_tokens += num_eligible

    def may_step(self) -> bool:
        """Return whether to train now."""
        state = self.state
        if state.credit <= 0:
            state.is_training, state.new_tokens = False, 0 if state.is_training else state.new_tokens
        elif state.new_tokens >= self._min_tokens:
            state.is_training = True
        return state.is_training

    def spend(self, num_anchors: int) -> None:
        """Count what a step used."""
        self.state.credit -= num_anchors
