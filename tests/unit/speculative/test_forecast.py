# SPDX-License-Identifier: Apache-2.0
"""Forecast of tokens per sequence: careful at first, then what the last steps took."""

from __future__ import annotations

from adaflash.speculative.forecast import LengthForecast


def test_before_anything_was_seen_a_sequence_takes_all_it_can() -> None:
    assert LengthForecast(8).tokens_per_seq == 8


def test_it_follows_what_steps_take() -> None:
    forecast = LengthForecast(16)
    for _ in range(40):
        forecast.observe(4 * 10, 10)
    assert forecast.tokens_per_seq in (4, 5)
    for _ in range(40):
        forecast.observe(10, 10)
    assert forecast.tokens_per_seq in (1, 2)


def test_what_varies_is_forecast_above_its_mean() -> None:
    forecast = LengthForecast(1)
    for step in range(100):
        forecast.observe(10 if step % 2 else 70, 10)
    assert 5 <= forecast.tokens_per_seq <= 8
