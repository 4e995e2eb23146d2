# SPDX-License-Identifier: Apache-2.0
"""The probability that a draft prefix is accepted, learned online from verify results. Host only, no torch.

Draft k of a block is accepted, given that all before it were, with probability p_k = sigmoid(theta . x_k), where x_k
holds a one of position k, the logit of the draft's confidence, and how far k is from the length head's prediction;
survival_k = p_0 ... p_k. Each temperature class has its own theta ~ N(mean, covariance), an extended Kalman filter.

A verify result is censored: it tells of the drafts up to the first rejection and, beyond that or beyond the verified
length, nothing. Learning only from what it tells leaves p_k unbiased however verify lengths are chosen from x.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from adaflash.ops.compiled import FAST, compiled, exp

NUM_TEMPERATURE_CLASSES = 3
CLASS_1_MAX_TEMPERATURE = 0.7

# Bounds of features: near 1 a confidence says ever less, and learning its weight from there misleads elsewhere.
_MIN_CONFIDENCE, _MAX_CONFIDENCE, _MAX_DISTANCE = 3e-4, 0.997, 2.0
# Of p_k's logit, so that survival of 15 drafts stays above 0; of a component of theta.
_MAX_SCORE, _MAX_COMPONENT = 16.0, 20.0

# The prior of theta: a bias that makes the first predictions pessimistic, the confidence taken as it is. Standard
# deviations of what the positions' biases share, of what each has to itself (alike in neighbours, by a factor e less
# for each _NEIGHBOURHOOD positions), and of the two weights.
_PRIOR_BIAS, _PRIOR_WEIGHT = -0.5, 1.0
_SHARED_SD, _POSITION_SD, _NEIGHBOURHOOD = 1.0, 0.7, 3.0
_WEIGHT_SD, _RATIO_WEIGHT_SD = 0.5, 1.0

# Share of the way back to the prior's covariance: of each draft, so that it forgets, and of a swap of weights. With
# 1e-4, 3e-4, 1e-3 a draft, simulated log loss exceeds the best by 0.043, 0.026, 0.019 nats over the 2,000 drafts after
# acceptance fell from 0.8 to 0.2, and by 0.003, 0.004, 0.005 where nothing changes.
_FORGOTTEN_PER_DRAFT, _FORGOTTEN_PER_SHIFT = 3e-4, 0.2

# The calibration error's effective sample size is (1 + d) / (1 - d) = 2,000 drafts.
_NUM_BINS, _DECAY = 10, 1999 / 2001

# Newton's steps to the mode of an update. Their error is squared, so that one of this size in the logit is the last.
_MAX_STEPS, _TOLERANCE = 30, 0.05

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def temperature_class(temperature: float) -> int:
    """Return which drafts learn together: 0 greedy, 1 of temperatures in (0, 0.7], 2 above."""
    assert temperature >= 0, f"temperature={temperature} is not one a request can have"
    return 0 if temperature == 0 else 1 if temperature <= CLASS_1_MAX_TEMPERATURE else 2


class SurvivalModel:
    """Predicts survival of draft prefixes and learns from their verify results; one thread.

    A confidence of NaN counts as 0, a length ratio of NaN as no length head.

    Args:
        num_positions: K, drafts of a block.

    Attributes:
        num_drafts: Draft blocks learned from.
    """

    def __init__(self, num_positions: int) -> None:
        assert num_positions >= 1, f"num_positions={num_positions}: a block has at least one draft"
        self._num_positions = num_positions
        self._prior_covariance = _prior_covariance(num_positions)  # [D, D], D = K + 2
        prior_mean = np.full(num_positions + 2, _PRIOR_BIAS)
        prior_mean[num_positions:] = _PRIOR_WEIGHT, 0.0
        self._mean = np.tile(prior_mean, (NUM_TEMPERATURE_CLASSES, 1))  # [C, D]
        self._covariance = np.tile(self._prior_covariance, (NUM_TEMPERATURE_CLASSES, 1, 1))  # [C, D, D]
        self._bins = np.zeros((3, _NUM_BINS))  # Decayed counts, sums of predictions, sums of outcomes.
        self.num_drafts = 0

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of survival over about the last 2,000 drafts, in [0, 1]; 0 before any.

        sum_b n_b |mean prediction - mean outcome| / sum_b n_b over 10 bins of equal width, of verified drafts, each
        predicted before it was learned from.
        """
        counts, predictions, outcomes = self._bins
        total = counts.sum()
        return float(np.abs(predictions - outcomes).sum() / total) if total > 0 else 0.0

    def predict(self, confidence: Floats, classes: Ints, length_ratio: Floats | None) -> Floats:
        """Return the probability that the drafts up to each position are all accepted, [S, K] in (0, 1].

        Args:
            confidence: [S, K] largest probability of each draft distribution.
            classes: [S] temperature classes.
            length_ratio: [S] predicted (accepted + 1) / (K + 1); None without a length head.
        """
        classes = np.ascontiguousarray(classes, dtype=np.int64)
        return self._predicted(self._features(confidence, classes, length_ratio), classes)

    def observe(
        self,
        confidence: Floats,
        classes: Ints,
        length_ratio: Floats | None,
        num_verified: Ints,
        num_accepted: Ints,
    ) -> None:
        """Learn from what became of drafts, given with what was known of them.

        Args:
            confidence: As in `predict`.
            classes: As in `predict`.
            length_ratio: As in `predict`.
            num_verified: [S] drafts verified, 0 to K; of 0, nothing is learned.
            num_accepted: [S] drafts accepted, 0 to `num_verified`.

        Raises:
            IndexError: A class or a number is out of its range; nothing was learned.
        """
        classes = np.ascontiguousarray(classes, dtype=np.int64)
        assert num_verified.shape == num_accepted.shape == classes.shape, "one number for each draft"
        num_verified = np.ascontiguousarray(num_verified, dtype=np.int64)
        num_accepted = np.ascontiguousarray(num_accepted, dtype=np.int64)
        features = self._features(confidence, classes, length_ratio)
        survival = self._predicted(features, classes)
        num_learned = np.zeros(NUM_TEMPERATURE_CLASSES, dtype=np.int64)
        _count(classes, num_verified, num_accepted, self._num_positions, num_learned)
        _tally(survival, num_verified, num_accepted, self._bins)
        for index, num_drafts in enumerate(num_learned.tolist()):
            if num_drafts:
                self._loosen(index, 1 - (1 - _FORGOTTEN_PER_DRAFT) ** num_drafts)
        _learn(features, classes, num_verified, num_accepted, self._mean, self._covariance)
        self.num_drafts += int(num_learned.sum())

    def shift(self) -> None:
        """Make what was learned less certain, so that learning is fast again: the drafter's weights were swapped."""
        for index in range(NUM_TEMPERATURE_CLASSES):
            self._loosen(index, _FORGOTTEN_PER_SHIFT)

    def _loosen(self, index: int, share: float) -> None:
        """Take a class's covariance a share of the way to the prior's, which bounds it and keeps it positive."""
        self._covariance[index] += share * (self._prior_covariance - self._covariance[index])

    def _features(self, confidence: Floats, classes: Ints, length_ratio: Floats | None) -> Floats:
        """Return x of every draft but for the one of its position, [2, S, K]."""
        shape = (len(classes), self._num_positions)
        assert confidence.shape == shape, f"confidence has shape {confidence.shape}, not {shape}"
        ratios = np.empty(0) if length_ratio is None else np.ascontiguousarray(length_ratio, dtype=np.float64)
        assert length_ratio is None or ratios.shape == shape[:1], f"length_ratio has shape {ratios.shape}"
        features = np.empty((2, *shape))
        _featurize(np.ascontiguousarray(confidence, dtype=np.float64), ratios, features)
        return features

    def _predicted(self, features: Floats, classes: Ints) -> Floats:
        survival = np.empty(features.shape[1:])
        _predict(self._mean, features, classes, survival)
        return survival


def _prior_covariance(num_positions: int) -> Floats:
    """Return the covariance of theta before any draft, [D, D]: biases of positions, then the two weights."""
    positions = np.arange(num_positions)
    distance = np.abs(positions[:, None] - positions)
    covariance = np.zeros((num_positions + 2, num_positions + 2))
    covariance[:num_positions, :num_positions] = _SHARED_SD**2 + _POSITION_SD**2 * np.exp(-distance / _NEIGHBOURHOOD)
    covariance[num_positions, num_positions] = _WEIGHT_SD**2
    covariance[num_positions + 1, num_positions + 1] = _RATIO_WEIGHT_SD**2
    return covariance


@compiled("void(float64[:, ::1], float64[::1], float64[:, :, ::1])")
def _featurize(confidence: Floats, ratios: Floats, features_: Floats) -> None:
    """Write x_k but for the one of its position: the confidence's logit, the distance to the ratio, [2, S, K]."""
    num_seqs, num_positions = confidence.shape
    for s in range(num_seqs):
        for k in range(num_positions):
            c = confidence[s, k]
            c = c if c > _MIN_CONFIDENCE else _MIN_CONFIDENCE  # NaN too.
            c = c if c < _MAX_CONFIDENCE else _MAX_CONFIDENCE
            features_[0, s, k] = math.log(c / (1 - c))
            features_[1, s, k] = 0.0
        if ratios.shape[0] > 0 and not math.isnan(ratios[s]):
            for k in range(num_positions):
                distance = 4 * (ratios[s] - (k + 1) / (num_positions + 1))
                distance = distance if distance > -_MAX_DISTANCE else -_MAX_DISTANCE
                features_[1, s, k] = distance if distance < _MAX_DISTANCE else _MAX_DISTANCE


@compiled("void(float64[:, ::1], float64[:, :, ::1], int64[::1], float64[:, ::1])", FAST)
def _predict(mean: Floats, features: Floats, classes: Ints, survival_: Floats) -> None:
    num_seqs, num_positions = survival_.shape
    for s in range(num_seqs):
        index = classes[s]
        if index < 0 or index >= mean.shape[0]:
            raise IndexError("a temperature class is out of its range")
        weight, ratio_weight = mean[index, num_positions], mean[index, num_positions + 1]
        for k in range(num_positions):
            score = mean[index, k] + weight * features[0, s, k] + ratio_weight * features[1, s, k]
            score = score if score > -_MAX_SCORE else -_MAX_SCORE
            score = score if score < _MAX_SCORE else _MAX_SCORE
            survival_[s, k] = 1 / (1 + np.float64(exp(np.float32(-score))))
        for k in range(1, num_positions):
            survival_[s, k] *= survival_[s, k - 1]


@compiled("void(int64[::1], int64[::1], int64[::1], int64, int64[::1])")
def _count(classes: Ints, num_verified: Ints, num_accepted: Ints, num_positions: int, drafts_: Ints) -> None:
    """Count the drafts of each class of which something was verified; raise on numbers that cannot be."""
    for s in range(classes.shape[0]):
        if not 0 <= num_accepted[s] <= num_verified[s] <= num_positions:
            raise IndexError("a draft has more accepted than verified, or more verified than it has positions")
        drafts_[classes[s]] += num_verified[s] > 0


@compiled("void(float64[:, ::1], int64[::1], int64[::1], float64[:, ::1])")
def _tally(survival: Floats, num_verified: Ints, num_accepted: Ints, bins_: Floats) -> None:
    """Add predictions and outcomes of verified drafts; beyond the first rejection the outcome is known to be 0."""
    for s in range(survival.shape[0]):
        if num_verified[s] == 0:
            continue
        bins_ *= _DECAY
        for k in range(num_verified[s]):
            b = min(int(survival[s, k] * _NUM_BINS), _NUM_BINS - 1)
            bins_[0, b] += 1
            bins_[1, b] += survival[s, k]
            bins_[2, b] += k < num_accepted[s]


@compiled("void(int64, float64, float64, float64, float64[::1], float64[::1], float64[:, ::1])", FAST)
def _update(k: int, x0: float, x1: float, label: float, gain_: Floats, theta_: Floats, covariance_: Floats) -> None:
    """Condition theta ~ N(mean, P) on one label by Laplace's approximation.

    The mode is mean + P x r, r = label - g, g = sigmoid(score + x.Px r); then P -= Px (Px)^T w / (1 + x.Px w) with
    w = g (1 - g). The usual filter takes g of the mean, and overshoots when a confident prediction fails.
    """
    size = theta_.shape[0]
    for i in range(size):
        gain_[i] = covariance_[k, i] + x0 * covariance_[size - 2, i] + x1 * covariance_[size - 1, i]
    spread = gain_[k] + x0 * gain_[size - 2] + x1 * gain_[size - 1]
    score = theta_[k] + theta_[size - 2] * x0 + theta_[size - 1] * x1
    score = score if score > -_MAX_SCORE else -_MAX_SCORE
    score = score if score < _MAX_SCORE else _MAX_SCORE
    # Newton's steps to the residual, half the interval it lies in where one leaves it.
    residual, low, high = 0.0, label - 1, label
    for _ in range(_MAX_STEPS):
        g = 1 / (1 + np.float64(exp(np.float32(-score - spread * residual))))
        weight, excess, previous = g * (1 - g), residual - (label - g), residual
        low, high = (low, residual) if excess > 0 else (residual, high)
        residual -= excess / (1 + spread * weight)
        if residual < low or residual > high:
            residual = (low + high) / 2
        if spread * abs(residual - previous) < _TOLERANCE:
            break
    scale = math.sqrt(weight / (1 + weight * spread))
    for i in range(size):
        component = theta_[i] + gain_[i] * residual
        component = component if component > -_MAX_COMPONENT else -_MAX_COMPONENT
        theta_[i] = component if component < _MAX_COMPONENT else _MAX_COMPONENT
        gain_[i] *= scale
    for i in range(size):
        row_gain = gain_[i]
        for j in range(size):
            covariance_[i, j] -= row_gain * gain_[j]


@compiled("void(float64[:, :, ::1], int64[::1], int64[::1], int64[::1], float64[:, ::1], float64[:, :, ::1])")
def _learn(
    features: Floats, classes: Ints, num_verified: Ints, num_accepted: Ints, mean_: Floats, covariance_: Floats
) -> None:
    """Update theta by every draft whose acceptance is known and whose prefix was accepted."""
    gain = np.empty(mean_.shape[1])
    for s in range(classes.shape[0]):
        theta, covariance = mean_[classes[s]], covariance_[classes[s]]
        accepted = num_accepted[s]
        for k in range(accepted):
            _update(k, features[0, s, k], features[1, s, k], 1.0, gain, theta, covariance)
        if accepted < num_verified[s]:
            _update(accepted, features[0, s, accepted], features[1, s, accepted], 0.0, gain, theta, covariance)
