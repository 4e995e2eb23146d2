# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from numba import vectorize

from adaflash.ops.compiled import compiled, exp

exp_of = vectorize(["float32(float32)"])(lambda x: exp(x))


def test_exp_is_within_two_ulp():
    x = np.concatenate([np.linspace(-87, 88, 1_000_001), np.linspace(-1e-3, 1e-3, 10_001)]).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    assert np.abs((exp_of(x) - expected) / np.spacing(expected.astype(np.float32))).max() <= 2


@pytest.mark.parametrize(("x", "expected"), [(-1e30, 0), (-np.inf, 0), (-90, 0), (1e30, np.inf), (np.inf, np.inf)])
def test_exp_leaves_its_range_for_zero_and_infinity(x, expected):
    assert exp_of(np.float32(x)) == expected


def test_exp_keeps_nan():
    assert np.isnan(exp_of(np.float32("nan")))


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch, caplog):
    monkeypatch.setattr("numba.core.caching.CompileResultCacheImpl._locator_classes", [])

    @compiled("void(float32[::1])")
    def double(x_):
        for i in range(len(x_)):
            x_[i] *= 2

    x = np.ones(3, dtype=np.float32)
    double(x)
    assert x.tolist() == [2, 2, 2]
    assert "NUMBA_CACHE_DIR" in caplog.text
