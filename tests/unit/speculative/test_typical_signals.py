# SPDX-License-Identifier: Apache-2.0
"""What narrow blocks do not show is what such drafts usually show."""

from __future__ import annotations

import numpy as np
import pytest

from adaflash.speculative.budget import DraftSignals
from adaflash.speculative.typical_signals import TypicalSignals


def test_whole_blocks_come_back_as_they_are() -> None:
    typical = TypicalSignals(3, 2)
    confidence, ratio = typical.complete(DraftSignals([[0.9, 0.5, 0.1]], [0.7]), np.array([1]))
    assert confidence.tolist() == [[0.9, 0.5, 0.1]]
    assert ratio is not None
    assert ratio.tolist() == [0.7]


def test_a_narrow_block_is_completed_by_what_its_class_showed_there() -> None:
    typical = TypicalSignals(3, 2)
    for _ in range(60):
        typical.complete(DraftSignals([[0.9, 0.6, 0.2], [0.9, 0.9, 0.8]], [0.5, 0.9]), np.array([0, 1]))
    confidence, ratio = typical.complete(DraftSignals([[0.3], [0.4]], None), np.array([1, 0]))
    assert confidence == pytest.approx(np.array([[0.3, 0.9, 0.8], [0.4, 0.6, 0.2]]))
    assert ratio == pytest.approx([0.9, 0.5])


def test_narrow_blocks_are_learned_from_too() -> None:
    typical = TypicalSignals(2, 1)
    typical.complete(DraftSignals([[0.9, 0.9]], None), np.array([0]))
    for _ in range(100):
        typical.complete(DraftSignals([[0.2, 0.1]], None), np.array([0]))
    confidence, ratio = typical.complete(DraftSignals([[0.5]], None), np.array([0]))
    assert confidence[0] == pytest.approx([0.5, 0.1], abs=0.01)
    assert ratio is None, "no block ever had one"


def test_another_class_stands_in_until_there_is_something_of_ones_own() -> None:
    typical = TypicalSignals(2, 3)
    first, _ = typical.complete(DraftSignals([[0.5]], None), np.array([2]))
    assert first.tolist() == [[0.5, 0.5]], "nothing is known of anything"
    typical.complete(DraftSignals([[0.5, 0.8]], None), np.array([0]))
    second, _ = typical.complete(DraftSignals([[0.5]], None), np.array([2]))
    assert second[0] == pytest.approx([0.5, 0.8])


def test_a_confidence_that_is_no_number_does_not_spread() -> None:
    typical = TypicalSignals(2, 1)
    typical.complete(DraftSignals([[0.9, float("nan")], [1.0, 0.0]], None), np.array([0, 0]))
    confidence, _ = typical.complete(DraftSignals([[0.5]], None), np.array([0]))
    assert np.isfinite(confidence).all()
    assert 0 < confidence[0, 1] < 1
