# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from adaflash.ops.lazy_noise import lazy_argmax
from adaflash.ops.noise import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    TOKEN_STREAM,
    NoiseRows,
    Words,
    gumbel,
    philox,
    row_bits,
    uniform,
)

# Random123, tests/kat_vectors, philox4x32-10
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [torch.tensor([int(word, 16)]) for word in text.split()]


def random_rows(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return NoiseRows(*(torch.randint(high, (num_rows,), generator=generator) for high in (2**63 - 1, 128, 10**6)))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, expected):
    out = philox(Words(*words(counter)), tuple(words(key)))
    assert [f"{int(word):08x}" for word in out] == expected.split()


def test_bits_of_a_token_are_word_token_mod_4_of_its_group():
    seed, sample, index, token = 2**40 + 17, 3, 12, 4 * 1000 + 2
    rows = NoiseRows(*(torch.tensor([value]) for value in (seed, sample, index)))
    bits = row_bits(rows, RESIDUAL_STREAM, torch.tensor([5, 1000]))[0, 1, token % 4]
    counter = Words(*(torch.tensor([word]) for word in (token // 4, index, sample, RESIDUAL_STREAM)))
    assert bits == philox(counter, (torch.tensor([17]), torch.tensor([2**8])))[2]


def test_noise_of_chosen_columns_is_that_of_their_tokens():
    rows, ids = random_rows(5), torch.randperm(1001, generator=torch.Generator().manual_seed(1))[:333]
    assert torch.equal(gumbel(rows, TOKEN_STREAM, 333, ids), gumbel(rows, TOKEN_STREAM, 1001, None)[:, ids])


def test_noise_is_finite_and_follows_the_gumbel_law():
    noise = gumbel(random_rows(40), TOKEN_STREAM, 5000, None)
    assert torch.isfinite(noise).all()
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3


def test_uniforms_stay_inside_the_open_interval(monkeypatch):
    extremes = torch.tensor([0, 1, 2**32 - 1, 2**32 - 100]).view(4, 1, 1)
    monkeypatch.setattr("adaflash.ops.noise.row_bits", lambda rows, stream, groups: extremes)
    u = uniform(random_rows(4), ACCEPT_STREAM)
    assert u.dtype == torch.float32
    assert u.tolist() == [2.0**-33, 1.5 * 2.0**-32, 1 - 2.0**-24, 1 - 2.0**-24]


def test_streams_samples_seeds_and_indexes_are_uncorrelated():
    base = NoiseRows(*(torch.tensor([value] * 5) for value in (5, 0, 7)))
    one = torch.tensor([0, 1, 0, 0, 0])
    rows = NoiseRows(base.seed + one, base.sample_index + one.roll(1), base.output_index + one.roll(2))
    noise = torch.cat([gumbel(rows, stream, 20_000, None)[:4] for stream in range(3)])
    correlation = np.corrcoef(noise.numpy()) - np.eye(12)
    assert np.abs(correlation).max() < 5 / np.sqrt(20_000)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 5.0, 60.0, 1e5, 1e9])
@pytest.mark.parametrize("columns", ["all", "sorted", "shuffled"])
def test_lazy_argmax_equals_evaluating_all_noise(scale, columns):
    num_columns, generator = 3001, torch.Generator().manual_seed(2)
    ids = {"all": None, "sorted": torch.arange(num_columns) * 3, "shuffled": torch.randperm(9000)[:num_columns]}
    scores = scale * torch.randn(40, num_columns, generator=generator)
    scores[20:] = scores[20:].bfloat16().float()  # ties
    scores[10:30] = scores[10:30].masked_fill(torch.rand(20, num_columns, generator=generator) < 0.99, float("-inf"))
    rows = random_rows(40)
    expected = (scores + gumbel(rows, TOKEN_STREAM, num_columns, ids[columns])).argmax(-1)
    assert torch.equal(lazy_argmax(scores, rows, TOKEN_STREAM, ids[columns]), expected)


def test_lazy_argmax_of_rows_without_a_finite_maximum_is_that_of_the_scores():
    scores = torch.randn(3, 3000)
    scores[0] = float("-inf")
    scores[1, [40, 50]] = float("nan")
    scores[2, [60, 70]] = float("inf")
    assert lazy_argmax(scores, random_rows(3), TOKEN_STREAM, None).tolist() == [0, 40, 60]


@pytest.mark.parametrize("ids", [torch.arange(0, 600, 2)[::2], torch.arange(150, dtype=torch.int32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lazy_argmax_takes_any_layout_and_dtype(ids, dtype):
    scores, rows = torch.randn(2, 300).to(dtype)[:, ::2], random_rows(2)
    expected = (scores.float() + gumbel(rows, TOKEN_STREAM, 150, ids.long())).argmax(-1)
    assert torch.equal(lazy_argmax(scores, rows, TOKEN_STREAM, ids), expected)


def test_lazy_argmax_of_no_columns_is_an_error():
    with pytest.raises(ValueError, match="column"):
        lazy_argmax(torch.empty(2, 0), random_rows(2), TOKEN_STREAM, None)
