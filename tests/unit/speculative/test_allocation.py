# SPDX-License-Identifier: Apache-2.0
"""Verify lengths of a batch: equal to the best of all choices, within every limit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from adaflash.speculative.allocation import Allocation, FloatArray, IntArray, allocate

NUM_INSTANCES = 12_000


def random_survival(rng: np.random.Generator, num_seqs: int, width: int) -> FloatArray:
    """Return [num_seqs, width] survivals; some equal to one another, some zero."""
    conditional = rng.choice([0.0, 0.25, 0.5, 1.0, rng.random(), rng.random()], (num_seqs, width))
    return np.asarray(np.cumprod(conditional, axis=1))


def random_costs(rng: np.random.Generator, num_budgets: int) -> FloatArray:
    """Return seconds by number of drafts: smooth, in buckets, not even monotone, or forbidden beyond a limit."""
    kind = rng.integers(4)
    budgets = np.arange(num_budgets)
    if kind == 0:
        return np.asarray(1.0 + rng.random() * budgets)
    if kind == 1:
        return np.asarray(1.0 + rng.random() * (budgets // rng.integers(1, 5)))
    costs = 0.5 + rng.random(num_budgets)
    if kind == 3:
        costs[int(rng.integers(1, num_budgets + 1)) :] = np.inf
    return np.asarray(costs)


def brute_force(survival: FloatArray, caps: IntArray, step_s: FloatArray, num_certain: float) -> float:
    choices = itertools.product(*(range(cap + 1) for cap in caps))
    return max(
        (num_certain + sum(survival[s, :count].sum() for s, count in enumerate(lens))) / step_s[sum(lens)]
        for lens in choices
    )


def check_consistent(found: Allocation, survival: FloatArray, step_s: FloatArray, num_certain: float) -> None:
    expected = num_certain + sum(survival[s, :count].sum() for s, count in enumerate(found.lens))
    assert found.expected_tokens == pytest.approx(expected)
    assert found.goodput == pytest.approx(expected / step_s[sum(found.lens)])


def test_no_choice_is_better() -> None:
    rng = np.random.default_rng(0)
    for _ in range(NUM_INSTANCES):
        num_seqs, width = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        survival, caps = random_survival(rng, num_seqs, width), rng.integers(0, width + 1, num_seqs)
        step_s = random_costs(rng, int(caps.sum()) + 1)
        found = allocate(survival, caps, step_s, num_seqs)
        assert found.goodput == pytest.approx(brute_force(survival, caps, step_s, num_seqs))
        assert all(0 <= count <= cap for count, cap in zip(found.lens, caps, strict=True))
        check_consistent(found, survival, step_s, num_seqs)


def test_room_that_costs_nothing_is_used() -> None:
    survival = np.array([[0.9, 0.5, 0.01], [0.8, 0.3, 0.02]])
    in_a_bucket = np.full(7, 1.0)
    assert allocate(survival, np.array([3, 3]), in_a_bucket, 2).lens == [3, 3]
    dear_beyond = np.array([1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0])
    assert allocate(survival, np.array([3, 3]), dear_beyond, 2).lens == [2, 1]


def test_a_budget_that_is_not_allowed_is_not_taken() -> None:
    survival = np.ones((1, 3))
    assert allocate(survival, np.array([3]), np.array([1.0, 1.0, np.inf, np.inf]), 1).lens == [1]
    assert allocate(survival, np.array([3]), np.array([1.0, np.inf, np.inf, np.inf]), 1).lens == [0]


def test_a_dear_verification_is_left_out() -> None:
    rows = np.array([[0.9, 0.8, 0.1]])
    assert allocate(rows, np.array([3]), 1.0 + 0.6 * np.arange(4), 1).lens == [2]
    assert allocate(rows * 0.3, np.array([3]), 1.0 + 0.6 * np.arange(4), 1).lens == [0]
