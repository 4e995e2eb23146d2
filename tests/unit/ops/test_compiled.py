# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from numba import vectorize

from adaflash.ops.compiled import exp

exp_of = vectorize(["float32(float32)"])(lambda x: exp(x))


def test_exp_is_within_two_ulp():
    x = np.concatenate([np.linspace(-87, 88, 1_000_001), np.linspace(-1e-3, 1e-3, 10_001)]).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    assert np.abs((exp_of(x) - expected) / np.spacing(expected.astype(np.float32))).max() <= 2


@pytest.mark.parametrize(("x", "expected"), [(-1e30, np.exp(-87.0)), (-np.inf, np.exp(-87.0)), (1e30, np.exp(88.0))])
def test_exp_saturates_at_the_ends_of_its_range(x, expected):
    assert exp_of(np.float32(x)) == pytest.approx(expected, rel=1e-6)


def test_exp_keeps_nan():
    assert np.isnan(exp_of(np.float32("nan")))
