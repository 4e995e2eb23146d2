# SPDX-License-Identifier: Apache-2.0
"""Made-up answers have the acceptance length they were made for, and signals that tell something."""

from __future__ import annotations

import numpy as np
import pytest

from adaflash.errors import ConfigError
from adaflash.simulate.acceptance import Answer
from adaflash.simulate.synthetic import SyntheticAnswers

NUM_REQUESTS, NUM_TOKENS, NUM_DRAFTS = 256, 512, 15


def made_up(acceptance_length: float, num_drafts: int = NUM_DRAFTS, seed: int = 0) -> list[Answer]:
    answers = SyntheticAnswers(acceptance_length, num_drafts, NUM_REQUESTS, 32, NUM_TOKENS, seed)
    return [answers[i] for i in range(NUM_REQUESTS)]


def num_rounds(answer: Answer) -> int:
    """Rounds that verify every draft, up to a block that may reach past the end."""
    rounds, anchor = 0, 0
    while anchor < len(answer.num_matched):
        anchor += int(answer.num_matched[anchor]) + 1
        rounds += 1
    return rounds


@pytest.mark.parametrize(("acceptance_length", "num_drafts"), [(1.2, 15), (3.4, 15), (7.09, 15), (9.83, 15), (2.5, 7)])
@pytest.mark.parametrize("num_requests", [32, 256])
def test_tokens_per_round_are_the_acceptance_length(
    acceptance_length: float, num_drafts: int, num_requests: int
) -> None:
    """Blocks are independent, so all of a request's count: its tokens per round are the mean of num_matched + 1."""
    num_tokens = 131_072 // num_requests
    answers = SyntheticAnswers(acceptance_length, num_drafts, num_requests, 32, num_tokens, 0)
    lengths = [float((answers[i].num_matched + 1).mean()) for i in range(num_requests)]
    assert num_requests / sum(1 / length for length in lengths) == pytest.approx(acceptance_length, rel=0.01)


def test_requests_differ() -> None:
    lengths = [NUM_TOKENS / num_rounds(answer) for answer in made_up(7.09)]
    assert np.quantile(lengths, 0.1) < 5 < 10 < np.quantile(lengths, 0.9)


def test_accepted_drafts_are_geometric_within_a_request() -> None:
    answers = SyntheticAnswers(7.09, NUM_DRAFTS, NUM_REQUESTS, 32, 20_000, 0)
    for number in (0, 7, 100):
        reached = [(answers[number].num_matched >= k).mean() for k in range(NUM_DRAFTS + 1)]
        assert reached == pytest.approx(answers.rates[number] ** np.arange(NUM_DRAFTS + 1), abs=0.02)


def test_signals_tell_right_drafts_from_wrong_ones_but_not_surely() -> None:
    answers = made_up(3.4)
    first = np.concatenate([answer.confidence[:, 0] for answer in answers])
    is_right = np.concatenate([answer.num_matched > 0 for answer in answers])
    right, wrong = first[is_right], first[~is_right]
    ranks = np.searchsorted(np.sort(wrong), right) / len(wrong)
    assert 0.65 < ranks.mean() < 0.98, "the area under the ROC curve"
    ratio = np.concatenate([answer.length_ratio for answer in answers if answer.length_ratio is not None])
    accepted = np.concatenate([answer.num_matched for answer in answers])
    assert 0.3 < np.corrcoef(ratio, accepted)[0, 1] < 0.95


def test_length_ratios_are_right_on_average() -> None:
    answers = made_up(7.09)
    ratio = np.concatenate([answer.length_ratio for answer in answers if answer.length_ratio is not None])
    accepted = np.concatenate([answer.num_matched for answer in answers])
    assert (16 * ratio).mean() == pytest.approx((accepted + 1).mean(), rel=0.03)


def test_the_same_seed_gives_the_same_answers_in_any_order() -> None:
    one, other = (SyntheticAnswers(3.4, NUM_DRAFTS, 8, 32, 64, 5) for _ in range(2))
    forwards, backwards = [one[i] for i in range(8)], [other[i] for i in reversed(range(8))][::-1]
    for a, b in zip(forwards, backwards, strict=True):
        assert np.array_equal(a.confidence, b.confidence)
        assert np.array_equal(a.num_matched, b.num_matched)
    different = SyntheticAnswers(3.4, NUM_DRAFTS, 8, 32, 64, 6)[0]
    assert not np.array_equal(different.confidence, one[0].confidence)


@pytest.mark.parametrize("acceptance_length", [0.5, 1.0, 16.0, float("nan")])
def test_an_impossible_acceptance_length_is_refused(acceptance_length: float) -> None:
    with pytest.raises(ConfigError, match=r"acceptance_length=.* is invalid: must be in \(1, 16\)"):
        made_up(acceptance_length)
