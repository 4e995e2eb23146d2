# SPDX-License-Identifier: Apache-2.0
"""The canary's error rates, by simulated traffic whose requests differ from each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from adaflash.errors import ConfigError
from adaflash.training.canary import Canary, CanaryConfig, Verdict

NUM_DRAFTS = 7


def run(candidate: float, good: float, seed: int, spread: float = 0.15, config: CanaryConfig | None = None) -> Canary:
    """Serve requests of 10 to 80 rounds until there is a verdict; arguments are acceptance rates of a draft."""
    rng, canary = np.random.default_rng(seed), Canary(config or CanaryConfig())
    index = 0
    while canary.verdict is Verdict.UNDECIDED:
        index += 1
        is_candidate = bool(rng.random() < canary.config.fraction)
        rate = float(np.clip(rng.normal(candidate if is_candidate else good, spread), 0.0, 0.95))
        num_rounds = int(rng.integers(10, 80))
        accepted = np.minimum(rng.geometric(1 - rate, num_rounds) - 1, NUM_DRAFTS)
        canary.observe(is_candidate, str(index), num_rounds, num_rounds + int(accepted.sum()))
    return canary


@pytest.mark.parametrize("num_swaps", [30, pytest.param(500, marks=pytest.mark.full)])
@pytest.mark.parametrize(("rate", "spread"), [(0.4, 0.15), (0.4, 0.3), (0.1, 0.05), (0.02, 0.02)])
def test_an_equal_candidate_is_not_rolled_back(rate, spread, num_swaps):
    verdicts = [run(rate, rate, seed, spread).verdict for seed in range(num_swaps)]
    assert verdicts.count(Verdict.ROLL_BACK) == 0


def test_a_useless_candidate_is_rolled_back_within_2000_drafts():
    for seed in range(200):
        canary = run(0.0, 0.4, seed, spread=0.05)
        assert canary.verdict is Verdict.ROLL_BACK
        assert canary.num_drafts <= 2000


def test_a_candidate_far_below_the_limit_is_rolled_back():
    canaries = [run(0.2, 0.4, seed, spread=0.1) for seed in range(100)]
    assert all(canary.verdict is Verdict.ROLL_BACK for canary in canaries)


def test_a_better_candidate_is_promoted_before_the_requests_run_out():
    canaries = [run(0.55, 0.4, seed, spread=0.1) for seed in range(100)]
    assert all(canary.verdict is Verdict.PROMOTE for canary in canaries)
    lengths = np.mean([[c.candidate_acceptance_length, c.good_acceptance_length] for c in canaries], axis=0)
    assert lengths[0] > 1.2 * lengths[1]


def test_rounds_one_by_one_count_as_much_as_all_at_once():
    one_by_one, at_once = Canary(CanaryConfig()), Canary(CanaryConfig())
    rng = np.random.default_rng(0)
    for index in range(40):
        tokens = rng.integers(1, 8, 20).tolist()
        for count in tokens:
            one_by_one.observe(index % 2 == 0, str(index), 1, count)
        at_once.observe(index % 2 == 0, str(index), len(tokens), sum(tokens))
    assert one_by_one._candidate.residual_squares == pytest.approx(at_once._candidate.residual_squares)
    assert one_by_one.candidate_acceptance_length == at_once.candidate_acceptance_length


def test_nothing_is_decided_on_few_requests_and_a_verdict_stays():
    canary = Canary(CanaryConfig(min_requests=5))
    assert math.isnan(canary.candidate_acceptance_length)
    for index in range(4):
        assert canary.observe(True, f"c{index}", 50, 50) is Verdict.UNDECIDED
        assert canary.observe(False, f"g{index}", 50, 200 + index) is Verdict.UNDECIDED
    while canary.verdict is Verdict.UNDECIDED:
        index += 1
        canary.observe(True, f"c{index}", 50, 50)
        canary.observe(False, f"g{index}", 50, 200 + index % 7)
    assert canary.verdict is Verdict.ROLL_BACK
    assert canary.observe(True, "late", 50, 400) is Verdict.ROLL_BACK


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.0}, "canary_fraction=0.0 is invalid: must be > 0 and < 1"),
        ({"fraction": math.nan}, "canary_fraction=nan"),
        ({"max_drop": 1.0}, "canary_max_drop=1.0"),
        ({"error_rate": 0.5}, "canary_error_rate=0.5 is invalid: must be > 0 and < 0.5"),
        ({"min_requests": 3}, "canary_min_requests=3"),
        ({"min_requests": 30, "max_requests": 20}, "<= canary_max_requests=20"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CanaryConfig(**options)
