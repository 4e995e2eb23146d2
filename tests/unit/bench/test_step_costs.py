# SPDX-License-Identifier: Apache-2.0
"""Costs of served steps: medians that a stall does not move, and a profile for what was not served."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served_steps import ServedStep
from step_costs import MIN_STEPS, StepLimits, fit, median_samples, priced, size_class, step_samples, taken

from adaflash.speculative.cost_model import CostModel
from adaflash.speculative.cost_table import CostSample

LIMITS = StepLimits(num_seqs=4, draft_block_size=8, max_num_tokens=256, num_context=400)


def rest_s(num_tokens, num_context):
    return 1e-3 * (10 + num_tokens + num_context / 100)


def draft_s(num_rows):
    return 1e-3 * (2 + num_rows / 2)


def step(num_tokens, num_context, num_draft_rows=0, caught_up=False):
    seconds = draft_s(num_draft_rows) if num_draft_rows else 0.0
    rest = rest_s(num_tokens, num_context)
    return ServedStep(4, num_tokens, 0, num_context, rest, num_draft_rows, num_context, seconds, caught_up, 4)


def forwards_alone(share):
    """A profile in which everything takes a share of what it takes when served."""
    verify = [CostSample(n, 1, 0, share * rest_s(n, 400)) for n in (1, 2, 4, 8, 16, 32)]
    return CostModel.from_samples(verify, [CostSample(n, 0, 0, share * draft_s(n)) for n in (2, 8, 32)], 256, 32)


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (13, 13), (16, 16), (17, 16), (21, 24), (40, 48), (251, 256)])
def test_small_sizes_stand_for_themselves_and_large_ones_for_the_nearest_knot(size, expected):
    assert size_class(size) == expected


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 4), st.integers(0, 4000), st.floats(1e-3, 1.0))))
def test_no_size_is_lost_and_no_time_is_made_up(rows):
    samples = [CostSample(*row) for row in rows]
    medians = median_samples(samples)
    assert {size_class(sample.size) for sample in medians} == {size_class(sample.size) for sample in samples}
    for median in medians:
        alike = [s.seconds for s in samples if size_class(s.size) == size_class(median.size)]
        assert min(alike) <= median.seconds <= max(alike)


def test_a_stall_moves_nothing():
    samples = [CostSample(4, 4, 400, seconds) for seconds in (0.010, 0.011, 0.012, 0.011, 9.0)]
    assert median_samples(samples) == [CostSample(4, 4, 400, 0.011)]


def test_a_rare_kind_does_not_count_beside_a_common_one():
    common = [CostSample(4, 4, 400, 0.01)] * MIN_STEPS
    assert median_samples([*common, CostSample(4, 3, 400, 9.0)]) == [CostSample(4, 4, 400, 0.01)]
    # Of a size that was never seen otherwise it is all that is known.
    assert median_samples([*common, CostSample(5, 3, 400, 9.0)])[1:] == [CostSample(5, 3, 400, 9.0)]


def test_contexts_are_kept_apart_where_there_are_enough_steps():
    samples = [CostSample(4, 4, context, 0.01) for context in (100, 1600) for _ in range(MIN_STEPS)]
    assert [sample.num_context for sample in median_samples(samples)] == [100, 1600]
    assert [sample.num_context for sample in median_samples(samples[1:-1])] == [850]


def test_the_model_predicts_steps_that_it_has_not_seen():
    rng = np.random.default_rng(0)
    steps = [step(int(n), int(rng.integers(200, 800)), int(n)) for n in rng.choice((4, 8, 16, 24), 400)]
    model, _ = fit(step_samples(steps), forwards_alone(0.5), LIMITS)
    unseen = [step(12, 300, 12), step(20, 700, 20)]
    assert priced(unseen, model).total == pytest.approx(taken(unseen).total, rel=0.03)
    assert priced([], model).total == 0.0


def test_context_costs_what_it_costs():
    steps = [step(4, context) for context in range(100, 2000, 10)]
    model, _ = fit(step_samples(steps), forwards_alone(0.5), LIMITS)
    short, long = priced([step(4, 150)], model).rest_s, priced([step(4, 1950)], model).rest_s
    assert long - short == pytest.approx(rest_s(4, 1950) - rest_s(4, 150), rel=0.1)


def test_sizes_that_were_not_served_are_profiled_ones_as_much_dearer_as_served_ones():
    steps = [step(4, 400, 8)] * MIN_STEPS
    model, samples = fit(step_samples(steps), forwards_alone(0.5), LIMITS)
    assert {sample.size for sample in samples.verify} >= {1, 2, 4, 8, 32}
    assert float(model.verify_s(4, np.array([32]), 400)[0]) == pytest.approx(rest_s(32, 400), rel=0.02)
    assert float(model.draft_s(np.array([4]), 400, 7)[0]) == pytest.approx(draft_s(32), rel=0.02)


def test_without_a_served_draft_the_profile_counts_as_it_is():
    model, _ = fit(step_samples([step(4, 400)] * MIN_STEPS), forwards_alone(0.5), LIMITS)
    assert float(model.draft_s(np.array([4]), 400, 7)[0]) == pytest.approx(draft_s(32) / 2, rel=0.02)


def test_a_draft_that_caught_up_says_nothing_about_drafts():
    samples = step_samples([step(8, 400, 8), step(8, 400, 8, caught_up=True), step(4, 400)])
    assert (len(samples.verify), len(samples.draft)) == (3, 1)
