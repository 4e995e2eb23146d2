# SPDX-License-Identifier: Apache-2.0
"""The cost model predicts what was profiled, follows the machine's load at once, and changes its shape slowly."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash.speculative.cost_model import CostModel, StepCosts
from adaflash.speculative.cost_table import CostSample, CostTable, knots_up_to

SIZES = (1, 2, 4, 8, 16, 32, 64)
ALL = np.arange(1, 257)


def verify_seconds(num_seqs: int, num_tokens: int, num_context: int) -> float:
    """A machine: memory-bound up to 16 tokens, compute-bound beyond, and both terms."""
    return 20e-3 + max(0, num_tokens - 16) * 1e-3 + num_seqs * 4e-4 + num_context * 5e-6


def draft_seconds(num_rows: int, num_context: int) -> float:
    return 3e-3 + num_rows * 1e-3 + num_context * 1e-6


def profiled_model() -> CostModel:
    shapes = [(-(-size // 8), size, 32) for size in SIZES]
    shapes += [(4, 4, 32), (16, 16, 32), (16, 64, 32), (1, 1, 2000), (1, 8, 2000)]
    verify = [CostSample(t, s, s * c, verify_seconds(s, t, s * c)) for s, t, c in shapes]
    draft = [CostSample(r, 0, c, draft_seconds(r, c)) for r, c in [(2, 32), (8, 32), (16, 64), (32, 128), (8, 2000)]]
    return CostModel.from_samples(verify, draft, max_num_tokens=256, max_draft_rows=256)


def verify_at(model: StepCosts, num_tokens: int, num_seqs: int = 1, num_context: int = 32) -> float:
    return float(model.verify_s(num_seqs, np.array([num_tokens]), num_context)[0])


def draft_at(model: StepCosts, num_seqs: int = 1) -> float:
    return float(model.draft_s(np.array([num_seqs]), 32, 7)[0])


def shape(model: StepCosts) -> list[float]:
    """Every cost a decision for one sequence could look at, as a share of the first."""
    verify = model.verify_s(1, ALL, 32)
    draft = model.draft_s(np.arange(1, 33), 32, 7)
    costs: list[float] = (np.concatenate([verify, draft]) / verify[0]).tolist()
    return costs


def steps(model: CostModel, num_tokens: Iterable[int], slowness: float = 1.0, noise: float = 0.0) -> None:
    """Run steps of one sequence, each with a draft."""
    rng = np.random.default_rng(0)
    for size in num_tokens:
        factors = slowness * np.exp(noise * rng.standard_normal(2))
        model.observe_draft(8, 32, draft_seconds(8, 32) * factors[0])
        model.observe_verify(1, size, 32, verify_seconds(1, size, 32) * factors[1])


def test_knots_are_powers_and_their_middles_up_to_the_limit() -> None:
    assert knots_up_to(1) == [1]
    assert knots_up_to(7) == [1, 2, 3, 4, 6, 7]
    assert knots_up_to(96) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]


def test_where_costs_rise_in_steps_the_first_steps_have_knots_at_both_ends() -> None:
    assert knots_up_to(96, 4) == [1, 2, 4, 5, 8, 9, 12, 13, 16, 17, 24, 32, 48, 64, 96]
    assert knots_up_to(7, 4) == [1, 2, 4, 5, 7]
    assert knots_up_to(40, 8) == [1, 2, 8, 9, 16, 17, 24, 25, 32, 33, 40]


def test_a_step_of_costs_stays_a_step() -> None:
    samples = [CostSample(size, 0, 0, 0.05 + 0.01 * -(-size // 4)) for size in (1, 4, 5, 8, 9, 12, 13, 16, 17, 32)]
    table = CostTable.fit(samples, 64, row_multiple=4)
    seconds = table.seconds(np.arange(1, 17), 0, 0)
    np.testing.assert_allclose(seconds, 0.05 + 0.01 * (1 + np.arange(16) // 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "num_context"), [(1, 1, 32), (6, 48, 500), (9, 12, 3000), (2, 2, 0)]
)
def test_terms_are_told_apart_and_sizes_between_samples_interpolated(
    num_seqs: int, num_tokens: int, num_context: int
) -> None:
    expected = verify_seconds(num_seqs, num_tokens, num_context)
    assert verify_at(profiled_model(), num_tokens, num_seqs, num_context) == pytest.approx(expected, rel=0.01)


def test_sizes_beyond_the_samples_and_the_knots_are_extrapolated() -> None:
    model = profiled_model()
    for num_tokens in (128, 200, 256, 1000):
        assert verify_at(model, num_tokens) == pytest.approx(verify_seconds(1, num_tokens, 32), rel=0.01)
    assert draft_at(model, 32) == pytest.approx(draft_seconds(256, 32), rel=0.01)


def test_a_forward_that_drafts_nothing_is_free() -> None:
    assert profiled_model().draft_s(np.array([0, 1, 0]), 32, 7).tolist() == [
        0.0,
        pytest.approx(draft_seconds(8, 32)),
        0.0,
    ]


def test_what_cannot_draft_is_never_worth_drafting() -> None:
    model = CostModel.from_samples([CostSample(1, 1, 0, 0.1)], [], max_num_tokens=8, max_draft_rows=64)
    assert model.draft_s(np.array([0, 1]), 0, 7).tolist() == [0.0, math.inf]
    with pytest.raises(AssertionError, match="profiled drafting"):
        model.observe_draft(8, 0, 0.1)


def test_plain_decoding_samples_alone_give_no_term_of_sequences() -> None:
    samples = [CostSample(s, s, 0, 1e-2 + 1e-3 * s) for s in (1, 2, 4, 8)]
    table = CostTable.fit(samples, 8)
    assert table.per_seq_s == pytest.approx(0.0, abs=1e-8)
    assert table.seconds(np.array([1, 3, 8]), 1, 0) == pytest.approx([11e-3, 13e-3, 18e-3], rel=1e-3)


_SAMPLES = st.lists(
    st.builds(CostSample, st.integers(1, 300), st.integers(1, 64), st.integers(0, 5000), st.floats(1e-6, 100.0)),
    min_size=1,
    max_size=20,
)


@given(samples=_SAMPLES, num_seqs=st.integers(1, 64), num_context=st.integers(0, 100_000))
def test_no_samples_make_a_cost_that_is_not_positive_and_finite(
    samples: list[CostSample], num_seqs: int, num_context: int
) -> None:
    model = CostModel.from_samples(samples, samples, max_num_tokens=200, max_draft_rows=512)
    for seconds in (model.verify_s(num_seqs, ALL, num_context), model.draft_s(ALL, num_context, 7)):
        assert np.isfinite(seconds).all()
        assert (seconds > 0).all()


@given(
    observations=st.lists(st.tuples(st.booleans(), st.integers(1, 300), st.floats(1e-9, 1e6)), min_size=30, max_size=60)
)
def test_no_observations_make_a_cost_that_is_not_positive_and_finite(
    observations: list[tuple[bool, int, float]],
) -> None:
    model = profiled_model()
    for is_draft, size, seconds in observations:
        if is_draft:
            model.observe_draft(size, 32, seconds)
        else:
            model.observe_verify(1, size, 32, seconds)
    for costs in (model.verify_s(1, ALL, 32), model.draft_s(ALL, 32, 7)):
        assert np.isfinite(costs).all()
        assert (costs > 0).all()


def test_the_load_of_the_machine_is_followed_within_a_few_steps_and_cancels() -> None:
    model = profiled_model()
    before = shape(model)
    steps(model, [8] * 5, slowness=3.0)
    assert model.load == pytest.approx(3.0, rel=0.01)
    assert verify_at(model, 64) == pytest.approx(3 * verify_seconds(1, 64, 32), rel=0.02)
    assert draft_at(model, 4) == pytest.approx(3 * draft_seconds(32, 32), rel=0.02)
    assert shape(model) == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize("visited_before", [[8], [1, 2, 4, 8, 16, 24, 32, 64]])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_slow_spell_at_one_size_leaves_the_other_sizes_as_they_were(visited_before: list[int], noise: float) -> None:
    """The machine gets 4 times slower while only one size runs, in phases long and short."""
    model = profiled_model()
    steps(model, visited_before * 40, noise=noise)
    before = shape(model)
    for num_slow in (3, 10, 300):
        steps(model, [8] * num_slow, slowness=4.0, noise=noise)
        assert shape(model) == pytest.approx(before, rel=0.001 if noise == 0 else 0.08)
        steps(model, [8] * 50, noise=noise)
        assert shape(model) == pytest.approx(before, rel=0.001 if noise == 0 else 0.08)


def test_a_slow_spell_of_plain_decoding_changes_nothing_else() -> None:
    """Without drafts there is nothing to compare the one size with."""
    model = profiled_model()
    before = shape(model)
    for slowness in (1.0, 4.0, 0.5):
        for _ in range(300):
            model.observe_verify(1, 1, 32, verify_seconds(1, 1, 32) * slowness)
    assert model.load == pytest.approx(0.5, rel=0.01)
    assert shape(model) == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_lasting_change_of_shape_is_learned(noise: float) -> None:
    """From 16 tokens on everything has become twice as dear."""
    model, rng = profiled_model(), np.random.default_rng(1)
    for size in [4, 16, 8, 32, 2, 64] * 100:
        factors = np.exp(noise * rng.standard_normal(2)) * (1, 2 if size >= 16 else 1)
        model.observe_draft(8, 32, draft_seconds(8, 32) * factors[0])
        model.observe_verify(1, size, 32, verify_seconds(1, size, 32) * factors[1])
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        expected = verify_seconds(1, size, 32) * (2 if size >= 16 else 1) / draft_seconds(8, 32)
        assert verify_at(model, size) / draft_at(model) == pytest.approx(expected, rel=0.03 if noise == 0 else 0.1)


def test_a_draft_that_became_dearer_is_learned_without_bending_the_verify_table() -> None:
    model = profiled_model()
    before = model.verify_s(1, ALL, 32) / verify_at(model, 1)
    for _ in range(150):
        model.observe_draft(8, 32, 2 * draft_seconds(8, 32))
        model.observe_verify(1, 8, 32, verify_seconds(1, 8, 32))
    ratio = 2 * draft_seconds(8, 32) / verify_seconds(1, 8, 32)
    assert draft_at(model) / verify_at(model, 8) == pytest.approx(ratio, rel=0.03)
    assert draft_at(model) == pytest.approx(2 * draft_seconds(8, 32), rel=0.03)
    assert model.verify_s(1, ALL, 32) / verify_at(model, 1) == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize("when", [0, 100])
def test_a_stall_changes_almost_nothing(when: int) -> None:
    model = profiled_model()
    sizes = [4, 8, 16, 32] * 60
    steps(model, sizes[:when])
    before = shape(model)
    model.observe_draft(8, 32, draft_seconds(8, 32))
    model.observe_verify(1, 16, 32, 100 * verify_seconds(1, 16, 32))
    assert model.load == pytest.approx(1.0, rel=0.01)
    steps(model, sizes[when : when + 12])
    assert shape(model) == pytest.approx(before, rel=0.011)
    steps(model, sizes)
    assert shape(model) == pytest.approx(before, rel=0.002)


def test_rare_stalls_of_one_size_do_not_add_up() -> None:
    """One in twenty steps takes 100 times as long; the sizes they hit stay where they were."""
    model, rng = profiled_model(), np.random.default_rng(3)
    before = shape(model)
    for size in [4, 8, 16] * 200:
        stall = 100.0 if rng.random() < 0.05 else 1.0
        model.observe_draft(8, 32, draft_seconds(8, 32))
        model.observe_verify(1, size, 32, verify_seconds(1, size, 32) * stall)
    assert shape(model) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_seconds_that_no_forward_takes_are_programmer_errors(seconds: float) -> None:
    with pytest.raises(AssertionError, match="a forward takes"):
        profiled_model().observe_verify(1, 1, 0, seconds)
    with pytest.raises(AssertionError, match="a forward takes"):
        profiled_model().observe_draft(8, 0, seconds)
    with pytest.raises(AssertionError, match="a forward takes"):
        CostTable.fit([CostSample(1, 1, 0, seconds)], 8)


def test_a_learned_model_survives_json_without_its_load() -> None:
    model = profiled_model()
    steps(model, [4, 16] * 100, slowness=2.0)
    for size in [4, 16] * 100:
        model.observe_verify(1, size, 32, verify_seconds(1, size, 32) * size)
    again = CostModel.from_json(json.loads(json.dumps(model.to_json())))
    assert again.load == 1.0
    assert shape(again) == pytest.approx(shape(model), rel=1e-12)
    assert shape(again) != pytest.approx(shape(profiled_model()), rel=0.05), "something had been learned"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"knots": [1, 2, 2]}, "knots"),
        ({"knots": [2, 4, 8]}, "knots"),
        ({"knots": [1, 2, 1e300]}, "knots"),
        ({"knots": None}, "knots"),
        ({"base_s": [1.0, 1.0]}, "one length"),
        ({"base_s": [1.0, 0.0, 1.0]}, "base_s"),
        ({"base_s": [1.0, None, 1.0]}, "base_s"),
        ({"base_s": [1.0, True, 1.0]}, "base_s"),
        ({"base_s": "123"}, "base_s"),
        ({"corrections": [None, math.nan, 0.0]}, "corrections"),
        ({"per_seq_s": -1.0}, "per_seq_s"),
        ({"per_context_s": "1"}, "terms"),
    ],
)
def test_values_that_describe_no_model_are_refused(changes: dict[str, object], message: str) -> None:
    table = {"knots": [1, 2, 4], "base_s": [1.0, 1.0, 2.0], "per_seq_s": 0.0, "per_context_s": 0.0}
    table["corrections"] = [None, 0.5, None]
    CostModel.from_json({"verify": table, "draft": None})
    with pytest.raises(ValueError, match=message):
        CostModel.from_json({"verify": table | changes, "draft": None})


@pytest.mark.parametrize("values", [None, [], {}, {"verify": 1, "draft": None}, {"draft": None}])
def test_other_json_is_refused(values: object) -> None:
    with pytest.raises(ValueError, match="object"):
        CostModel.from_json(values)
