# SPDX-License-Identifier: Apache-2.0
"""What is drawn from the window, what leaves it, and when training pauses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from adaflash.training.replay_window import AnchorBudget, ReplayWindow, WindowBudget
from tests.training_setups import TrainingSetup


@pytest.fixture
def supervisor(setup: TrainingSetup) -> Any:
    return setup.parts().supervisor


def filled(setup: TrainingSetup, supervisor: Any, count: int, **settings: Any) -> ReplayWindow:
    """A window of trajectories whose prompt length is their number, from 1; each has 10 response tokens."""
    window = ReplayWindow(supervisor, **{"max_tokens": 10_000, "replay_share": 0.0, "recency_tokens": 20, **settings})
    for number in range(1, count + 1):
        assert window.add(setup.trajectory(num_prompt=number, num_response=10, seed=number)) == 9
    return window


def draws(window: ReplayWindow, count: int, seed: int = 0) -> Counter[int]:
    """How often each trajectory is drawn, by its number."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (window.draw(1, generator)[0] for _ in range(count))
    return Counter(len(item.sequence.token_ids) - 10 for item in drawn)


def test_the_oldest_leave_a_full_window(setup: TrainingSetup, supervisor: Any) -> None:
    window = filled(setup, supervisor, 6, max_tokens=44)
    assert set(draws(window, 60)) == {5, 6}
    assert window.num_tokens == 31
    assert window.num_added == 6


def test_one_trajectory_stays_however_long(setup: TrainingSetup, supervisor: Any) -> None:
    assert len(filled(setup, supervisor, 2, max_tokens=5)) == 1


def test_recent_trajectories_are_drawn_more_often(setup: TrainingSetup, supervisor: Any) -> None:
    window = filled(setup, supervisor, 4, recency_tokens=14)
    counts = draws(window, 400)
    assert counts[4] > counts[3] > counts[2] > counts[1] > 0
    # 14 tokens came after the third, so that it is half as likely as the fourth.
    assert counts[3] / counts[4] == pytest.approx(0.5, abs=0.15)


def test_the_replay_share_ignores_age(setup: TrainingSetup, supervisor: Any) -> None:
    window = filled(setup, supervisor, 4, recency_tokens=1, replay_share=0.4)
    counts = draws(window, 600)
    assert counts[4] / 600 == pytest.approx(0.7, abs=0.06)
    assert all(counts[n] / 600 == pytest.approx(0.1, abs=0.05) for n in (1, 2, 3))


def test_the_generator_decides_what_is_drawn(setup: TrainingSetup, supervisor: Any) -> None:
    window = filled(setup, supervisor, 5, replay_share=0.5)
    sequences = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        sequences.append([len(item.sequence.token_ids) for _ in range(20) for item in window.draw(2, generator)])
    assert sequences[0] == sequences[1] != sequences[2]


def test_a_draw_has_no_trajectory_twice(setup: TrainingSetup, supervisor: Any) -> None:
    window = filled(setup, supervisor, 3)
    drawn = window.draw(9, torch.Generator().manual_seed(0))
    assert sorted(len(item.sequence.token_ids) for item in drawn) == [11, 12, 13]
    assert ReplayWindow(supervisor, 10, 0.0, 1).draw(2, torch.Generator()) == []


def test_training_waits_for_enough_tokens_and_pauses_when_they_are_used_up() -> None:
    budget = AnchorBudget(WindowBudget(), min_tokens=100, max_epochs=2.0)
    assert not budget.may_step()
    budget.grant(99)
    assert not budget.may_step()
    budget.grant(1)
    num_anchors = 0
    while budget.may_step():
        budget.spend(40)
        num_anchors += 40
    assert num_anchors == 200
    budget.grant(99)
    assert not budget.may_step(), "a pause lasts until enough is new again"
    budget.grant(1)
    assert budget.may_step()


def test_tokens_that_come_while_training_prolong_it() -> None:
    budget = AnchorBudget(WindowBudget(), min_tokens=10, max_epochs=1.0)
    budget.grant(10)
    assert budget.may_step()
    budget.spend(8)
    budget.grant(5)
    budget.spend(2)
    assert budget.may_step()
    budget.spend(5)
    assert not budget.may_step()
    assert budget.state.new_tokens == 0
