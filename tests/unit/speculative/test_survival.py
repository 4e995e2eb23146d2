# SPDX-License-Identifier: Apache-2.0
"""The survival model: calibrated within 2,000 drafts of any drafter, pessimistic at first, sound at every input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from adaflash.speculative.survival import NUM_TEMPERATURE_CLASSES, SurvivalModel, temperature_class

K = 15
S = 16
NUM_DRAFTS = 2_000
MAX_ERROR = 0.05

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Acceptance = Callable[[Floats], Floats]
Policy = Callable[[Floats], Ints]

seeds = pytest.mark.parametrize("seed", range(3))


def _everything(survival: Floats) -> Ints:
    return np.full(len(survival), survival.shape[1])


def _likely(survival: Floats) -> Ints:
    return np.maximum((survival > 0.4).sum(1), 1)


def _best_of_batch(survival: Floats) -> Ints:
    """The 3 S most probable drafts of the whole batch: what one verifies hangs on all others."""
    threshold = np.sort(survival, axis=None)[-3 * len(survival)]
    return (survival >= threshold).sum(1)


def _confidence(rng: np.random.Generator) -> Floats:
    """Blocks of which some are confident throughout and some not."""
    return rng.beta(rng.choice([1.0, 3.0, 8.0], (S, 1)), rng.choice([0.5, 1.0, 2.0], (S, 1)), (S, K))


def _constant(p: float) -> Acceptance:
    return lambda confidence: np.full_like(confidence, p)


def _serve(
    model: SurvivalModel,
    rng: np.random.Generator,
    acceptance: Acceptance,
    policy: Policy = _everything,
    num_drafts: int = NUM_DRAFTS,
    temperature: int = 0,
) -> None:
    """Draft, choose lengths by predicted survival, verify, learn."""
    classes, end = np.full(S, temperature), model.num_drafts + num_drafts
    while model.num_drafts < end:
        confidence = _confidence(rng)
        num_matched = (rng.random((S, K)) < acceptance(confidence)).cumprod(1).sum(1)
        num_verified = policy(model.predict(confidence, classes, None))
        model.observe(confidence, classes, None, num_verified, np.minimum(num_matched, num_verified))


DRAFTERS = {
    "overconfident": lambda confidence: confidence**2,
    "underconfident": np.sqrt,
    "uninformative, bad": _constant(0.05),
    "uninformative, good": _constant(0.9),
    "worse by position": lambda confidence: confidence * 0.95 ** np.arange(K),
}


@seeds
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", [_everything, _likely, _best_of_batch])
def test_is_calibrated_after_2000_drafts_whoever_chooses_lengths(drafter: str, policy: Policy, seed: int) -> None:
    model = SurvivalModel(K)
    _serve(model, np.random.default_rng(seed), DRAFTERS[drafter], policy)
    assert 0 < model.calibration_error <= MAX_ERROR


@seeds
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", [_likely, _best_of_batch])
def test_choosing_lengths_by_prediction_does_not_bias_it(drafter: str, policy: Policy, seed: int) -> None:
    """What is predicted is right on average over all blocks, not only over those somebody chose."""
    model, rng = SurvivalModel(K), np.random.default_rng(seed)
    _serve(model, rng, DRAFTERS[drafter], policy, 2 * NUM_DRAFTS)
    confidence = np.concatenate([_confidence(rng) for _ in range(100)])
    predicted = model.predict(confidence, np.zeros(len(confidence), dtype=np.int64), None)
    true = DRAFTERS[drafter](confidence).cumprod(1)
    # Deeper positions are verified too seldom to be more than pessimistic.
    assert np.abs(predicted.mean(0) - true.mean(0))[:3].max() < 0.08


@seeds
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("policy", [_everything, _likely])
def test_is_calibrated_again_2000_drafts_after_acceptance_changed(policy: Policy, told: bool, seed: int) -> None:
    model, rng = SurvivalModel(K), np.random.default_rng(seed)
    for acceptance in (0.8, 0.2, 0.8):
        _serve(model, rng, _constant(acceptance), policy)
        assert model.calibration_error <= MAX_ERROR
        if told:
            model.shift()


def test_the_error_shows_a_change_before_it_is_learned() -> None:
    model, rng = SurvivalModel(K), np.random.default_rng(0)
    _serve(model, rng, _constant(0.9))
    _serve(model, rng, _constant(0.05), num_drafts=8 * S)
    before = model.calibration_error
    _serve(model, rng, _constant(0.05), num_drafts=2 * NUM_DRAFTS)
    assert before > 2 * model.calibration_error


@seeds
def test_a_shift_makes_it_learn_faster(seed: int) -> None:
    distances = []
    for told in (False, True):
        model, rng = SurvivalModel(K), np.random.default_rng(seed)
        _serve(model, rng, _constant(0.8))
        if told:
            model.shift()
        _serve(model, rng, _constant(0.2), num_drafts=4 * S)
        first = model.predict(_confidence(rng), np.zeros(S, dtype=np.int64), None)[:, 0]
        distances.append(float(np.abs(first - 0.2).mean()))
    assert distances[1] < 0.8 * distances[0]


def test_a_shift_changes_no_prediction() -> None:
    model, rng = SurvivalModel(K), np.random.default_rng(0)
    _serve(model, rng, DRAFTERS["overconfident"], num_drafts=200)
    confidence, classes = _confidence(rng), np.arange(S) % NUM_TEMPERATURE_CLASSES
    before = model.predict(confidence, classes, None)
    model.shift()
    np.testing.assert_array_equal(model.predict(confidence, classes, None), before)


@given(confidence=arrays(np.float64, (3, K), elements=st.floats(0.001, 1.0)), ratio=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_first_predictions_are_pessimistic(confidence: Floats, ratio: float) -> None:
    predicted = SurvivalModel(K).predict(confidence, np.arange(3), np.full(3, ratio))
    assert (predicted < confidence.cumprod(1)).all()


def test_drafts_nobody_verified_are_not_taken_for_failures() -> None:
    model, rng = SurvivalModel(K), np.random.default_rng(0)
    confidence = np.full((S, K), 0.7)
    classes = np.zeros(S, dtype=np.int64)
    first = model.predict(confidence, classes, None)[0]
    _serve(model, rng, _constant(0.9), lambda survival: np.ones(len(survival), dtype=np.int64), 5_000)
    survival = model.predict(confidence, classes, None)[0]
    conditional = survival[1:] / survival[:-1]
    assert abs(survival[0] - 0.9) < 0.05
    # Positions never seen follow the first one, the nearest closest.
    assert (conditional > first[1:] / first[:-1]).all()
    assert (np.diff(conditional) < 1e-6).all()


@seeds
def test_drafts_after_a_rejection_are_not_taken_for_failures(seed: int) -> None:
    """Good late positions, seldom reached: taken for failures, they would be accepted with less than 0.1."""
    acceptance = np.where(np.arange(K) == 0, 0.1, 0.9)
    model, rng = SurvivalModel(K), np.random.default_rng(seed)
    _serve(model, rng, lambda confidence: np.tile(acceptance, (len(confidence), 1)))
    survival = model.predict(_confidence(rng), np.zeros(S, dtype=np.int64), None)
    conditional = (survival[:, 1:] / survival[:, :-1]).mean(0)
    assert conditional.min() > 0.7


@seeds
def test_the_length_ratio_lowers_the_log_loss_where_only_it_informs(seed: int) -> None:
    losses = {}
    for with_head in (False, True):
        model, rng, loss = SurvivalModel(K), np.random.default_rng(seed), []
        classes = np.zeros(S, dtype=np.int64)
        for step in range(NUM_DRAFTS // S):
            num_matched = rng.integers(0, K + 1, S)
            noisy = np.clip((num_matched + 1 + rng.normal(0, 1, S)) / (K + 1), 0, 1)
            ratio = noisy if with_head else None
            confidence = rng.uniform(0.3, 0.95, (S, K))
            survival = model.predict(confidence, classes, ratio)
            survived = np.arange(K) < num_matched[:, None]
            if step >= NUM_DRAFTS // S // 2:
                loss.append(-np.log(np.where(survived, survival, 1 - survival)).mean())
            model.observe(confidence, classes, ratio, np.full(S, K), num_matched)
        losses[with_head] = np.mean(loss)
    assert losses[True] < 0.7 * losses[False]


def test_temperature_classes_learn_apart() -> None:
    model, rng = SurvivalModel(K), np.random.default_rng(0)
    confidence = _confidence(rng)
    first = model.predict(confidence, np.full(S, 2), None)
    _serve(model, rng, _constant(0.9), temperature=0)
    _serve(model, rng, _constant(0.1), temperature=1)
    by_class = [model.predict(confidence, np.full(S, index), None) for index in range(NUM_TEMPERATURE_CLASSES)]
    assert abs(by_class[0][:, 0].mean() - 0.9) < 0.06
    assert abs(by_class[1][:, 0].mean() - 0.1) < 0.06
    np.testing.assert_array_equal(by_class[2], first)
    assert model.calibration_error <= MAX_ERROR


@pytest.mark.parametrize(("temperature", "index"), [(0.0, 0), (1e-3, 1), (0.7, 1), (0.71, 2), (2.0, 2)])
def test_temperature_class(temperature: float, index: int) -> None:
    assert temperature_class(temperature) == index


EXTREMES = st.one_of(st.sampled_from([0.0, 1.0, float("nan"), 5e-324, 1 - 2**-53]), st.floats(0, 1))


@given(data=st.data(), num_positions=st.integers(1, 15), num_steps=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_survival_never_rises_and_stays_a_probability(data: st.DataObject, num_positions: int, num_steps: int) -> None:
    model = SurvivalModel(num_positions)
    for _ in range(num_steps + 1):
        num_seqs = data.draw(st.integers(0, 4))
        confidence = data.draw(arrays(np.float64, (num_seqs, num_positions), elements=EXTREMES))
        ratio = data.draw(st.none() | arrays(np.float64, num_seqs, elements=EXTREMES))
        classes = data.draw(arrays(np.int64, num_seqs, elements=st.integers(0, NUM_TEMPERATURE_CLASSES - 1)))
        survival = model.predict(confidence, classes, ratio)
        assert survival.shape == confidence.shape
        assert ((survival > 0) & (survival <= 1)).all()
        assert (np.diff(survival, axis=1) <= 0).all()
        num_verified = data.draw(arrays(np.int64, num_seqs, elements=st.integers(0, num_positions)))
        share = data.draw(st.floats(0, 1))
        model.observe(confidence, classes, ratio, num_verified, (share * num_verified).astype(np.int64))
        if data.draw(st.booleans()):
            model.shift()
        assert 0 <= model.calibration_error <= 1


def test_a_million_updates_leave_it_sound() -> None:
    """Extreme confidences, always right and then always wrong; one class is never observed, another seldom."""
    model, rng = SurvivalModel(K), np.random.default_rng(0)
    num_seqs, num_updates, step = 500, 0, 0
    while num_updates < 1_000_000:
        confidence = rng.choice([0.0, 1.0, 1e-300, 0.5], (num_seqs, K))
        classes = np.where(rng.random(num_seqs) < 0.01, 1, 0)
        ratio = rng.choice([0.0, 1.0, -1e300, 1e300], num_seqs)
        num_accepted = np.full(num_seqs, K if step // 20 % 2 == 0 else 0)
        model.observe(confidence, classes, ratio, np.full(num_seqs, K), num_accepted)
        num_updates, step = num_updates + int(np.minimum(num_accepted + 1, K).sum()), step + 1
    for mean, covariance in zip(model._mean, model._covariance, strict=True):
        assert np.abs(mean).max() <= 20
        np.testing.assert_array_equal(covariance, covariance.T)
        assert np.linalg.eigvalsh(covariance).min() > 0
        assert np.linalg.eigvalsh(model._prior_covariance - covariance).min() > -1e-9
    _serve(model, rng, DRAFTERS["overconfident"], num_drafts=2 * NUM_DRAFTS)
    assert model.calibration_error <= MAX_ERROR


def test_no_component_grows_without_bound() -> None:
    """From its bound, a surprise takes it no further."""
    model, classes = SurvivalModel(K), np.zeros(1, dtype=np.int64)
    model._mean[:] = 20.0
    model.observe(np.full((1, K), 0.001), classes, np.zeros(1), np.array([K]), np.array([K]))
    assert np.abs(model._mean).max() <= 20
    assert model._mean[0, K] < 19


def test_nan_counts_as_no_confidence_and_no_length_head() -> None:
    model, rng = SurvivalModel(K), np.random.default_rng(0)
    _serve(model, rng, DRAFTERS["overconfident"], num_drafts=S)
    classes = np.zeros(S, dtype=np.int64)
    predicted = model.predict(np.full((S, K), np.nan), classes, np.full(S, np.nan))
    np.testing.assert_array_equal(predicted, model.predict(np.zeros((S, K)), classes, None))
    assert (predicted[:, 0] < 0.1).all()


def test_rows_without_a_verified_draft_teach_nothing() -> None:
    model, rng = SurvivalModel(K), np.random.default_rng(0)
    confidence, classes, none = _confidence(rng), np.zeros(S, dtype=np.int64), np.zeros(S, dtype=np.int64)
    _serve(model, rng, DRAFTERS["overconfident"], num_drafts=S)
    before, mean, covariance = model.calibration_error, model._mean.copy(), model._covariance.copy()
    model.observe(confidence, classes, None, none, none)
    assert (model.num_drafts, model.calibration_error) == (S, before)
    np.testing.assert_array_equal(model._mean, mean)
    np.testing.assert_array_equal(model._covariance, covariance)


def test_the_calibration_error_is_of_predictions_made_before_learning() -> None:
    model = SurvivalModel(2)
    assert model.calibration_error == 0.0
    confidence, classes = np.array([[0.9, 0.9]]), np.zeros(1, dtype=np.int64)
    first, second = model.predict(confidence, classes, None)[0]
    assert int(first * 10) != int(second * 10)
    model.observe(confidence, classes, None, np.array([2]), np.array([0]))
    assert model.calibration_error == pytest.approx((first + second) / 2)
    assert model.num_drafts == 1


def test_the_calibration_error_forgets() -> None:
    """Its weight of a draft falls to e^-2 in 2,000 drafts: their effective number is 2,000."""
    model = SurvivalModel(1)
    confidence, classes, one = np.full((1, 1), 0.5), np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    for _ in range(20_000):
        model.observe(confidence, classes, None, one, one)
    assert model._bins[0].sum() == pytest.approx(1_000, rel=0.01)


@pytest.mark.parametrize(("num_verified", "num_accepted"), [(K + 1, 0), (3, 4), (-1, -1), (3, -1)])
def test_impossible_results_are_an_error_and_teach_nothing(num_verified: int, num_accepted: int) -> None:
    model, classes = SurvivalModel(K), np.zeros(2, dtype=np.int64)
    results = np.array([1, num_verified]), np.array([1, num_accepted])
    with pytest.raises(IndexError, match="more accepted than verified"):
        model.observe(np.full((2, K), 0.5), classes, None, *results)
    assert (model.num_drafts, model.calibration_error) == (0, 0.0)


@pytest.mark.parametrize("index", [-1, NUM_TEMPERATURE_CLASSES])
def test_a_class_that_does_not_exist_is_an_error(index: int) -> None:
    model, one = SurvivalModel(K), np.ones(1, dtype=np.int64)
    with pytest.raises(IndexError, match="temperature class"):
        model.predict(np.full((1, K), 0.5), np.array([index]), None)
    with pytest.raises(IndexError, match="temperature class"):
        model.observe(np.full((1, K), 0.5), np.array([index]), None, one, one)
