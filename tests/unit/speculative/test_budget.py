# SPDX-License-Identifier: Apache-2.0
"""Verify policies keep within their caps and follow their formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash.speculative.budget import DraftSignals, VerifyPolicy

WIDTH = 16
PROBABILITIES = st.lists(st.floats(0.0, 1.0), min_size=WIDTH - 1, max_size=WIDTH - 1)


@given(confidence=PROBABILITIES, ratio=st.floats(0.0, 1.0), cap=st.integers(0, WIDTH - 1))
@pytest.mark.parametrize("name", ["fixed", "confidence", "length_head"])
def test_every_length_is_between_zero_and_its_cap(name: str, confidence: list[float], ratio: float, cap: int) -> None:
    policy = VerifyPolicy(name, WIDTH, confidence_threshold=0.3, length_head_rate=1.3, length_head_min=1)
    assert 0 <= policy.choose(DraftSignals([confidence], [ratio]), [cap])[0] <= cap


@given(confidence=PROBABILITIES, threshold=st.floats(0.001, 1.0))
def test_confidence_keeps_the_longest_prefix_above_the_threshold(confidence: list[float], threshold: float) -> None:
    kept = VerifyPolicy("confidence", WIDTH, threshold).choose(DraftSignals([confidence], None), [WIDTH - 1])[0]
    products = [1.0]
    for probability in confidence:
        products.append(products[-1] * probability)
    assert all(product >= threshold for product in products[1 : kept + 1])
    assert kept == WIDTH - 1 or products[kept + 1] < threshold


@pytest.mark.parametrize(("accepted", "candidate"), [(0, 1), (3, 5), (7, 10), (11, 16), (15, 16)])
def test_length_head_widths_at_rate_1_3(accepted: int, candidate: int) -> None:
    """True accepted lengths and the candidate lengths the published serving rule makes of them."""
    policy = VerifyPolicy("length_head", WIDTH, length_head_rate=1.3)
    signals = DraftSignals([[1.0] * (WIDTH - 1)], [(accepted + 1) / WIDTH])
    assert policy.choose(signals, [WIDTH - 1])[0] + 1 == candidate


def test_length_head_respects_its_minimum() -> None:
    policy = VerifyPolicy("length_head", WIDTH, length_head_min=4)
    signals = DraftSignals([[1.0] * (WIDTH - 1)] * 2, [0.0, 0.0])
    assert policy.choose(signals, [WIDTH - 1, 2]) == [3, 2]
