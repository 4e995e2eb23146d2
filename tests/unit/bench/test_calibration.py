# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from calibration import calibration_error, measure, rounds

from adaflash.simulate.acceptance import Answer
from adaflash.speculative.survival import SurvivalModel


def answer(num_matched: list[int], confidence: float = 0.8) -> Answer:
    return Answer(5, np.full((len(num_matched), 3), confidence, dtype=np.float32), np.array(num_matched), None)


def test_the_error_is_the_gap_of_each_bin_weighted_by_its_size() -> None:
    pairs = np.array([(0.21, 1), (0.29, 0), (0.95, 1), (0.99, 1)])
    assert calibration_error(pairs) == pytest.approx((abs(0.5 - 1) + abs(1.94 - 2)) / 4)
    assert calibration_error(np.array([(1.0, 1), (0.0, 0)])) == 0


def test_a_round_goes_on_behind_what_it_accepted() -> None:
    seen = list(rounds([answer([2, 9, 9, 0, 3, 9, 9, 9]), answer([0])], SurvivalModel(3), 0.0))
    assert [pairs[:, 1].tolist() for pairs in seen] == [[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert all((np.diff(pairs[:, 0]) <= 0).all() for pairs in seen)


def test_only_likely_drafts_are_verified_and_one_always_is() -> None:
    model = SurvivalModel(3)
    assert [len(pairs) for pairs in rounds([answer([0] * 30, 0.02)], model, 0.9)] == [1] * 30
    assert max(len(pairs) for pairs in rounds([answer([3] * 80, 0.9)], SurvivalModel(3), 0.4)) == 3


def test_windows_are_whole() -> None:
    seen = [np.array([(0.5, k % 2)]) for k in range(7)]
    windows = measure("code", "all", seen, 3)
    assert [(w.first, w.num_verified) for w in windows] == [(0, 3), (3, 3)]
    assert windows[0].accepted == pytest.approx(1 / 3)
    assert windows[0].error == pytest.approx(abs(1.5 - 1) / 3)
