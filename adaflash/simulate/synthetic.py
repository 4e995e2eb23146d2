# SPDX-License-Identifier: Apache-2.0
"""Answers made up to have a published acceptance length, with drafts that are more or less right by request.

Request r accepts each draft, given those before it, with probability a_r ~ Beta, so that accepted drafts are geometric
within a block. The k-th draft of a block has its own p_k ~ Beta(a_r v, (1 - a_r) v), of which confidence and length
ratio are noisy observations: they tell good drafts of a request from bad ones, but not surely. Blocks are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adaflash.errors import ConfigError
from adaflash.simulate.acceptance import Answer

Doubles = npt.NDArray[np.float64]

_MIN_PROBABILITY = 1e-4
_LOGITS = np.linspace(-40.0, 40.0, 8001)


@dataclass(frozen=True)
class Assumptions:
    """What a published acceptance length does not say.

    Attributes:
        spread_between_requests: Sum of the Beta's parameters over requests; small is heterogeneous.
        spread_within_request: The same of a request's drafts, v.
        confidence_noise: Standard deviation that is added to the logit of p_k.
        ratio_noise: Standard deviation that is added to the length head's true expectation.
    """

    spread_between_requests: float = 8.0
    spread_within_request: float = 2.0
    confidence_noise: float = 1.0
    ratio_noise: float = 0.1


class SyntheticAnswers:
    """Answers with the acceptance length `acceptance_length` when every draft is verified.

    The length is tokens over rounds of all requests together, each with as many tokens; requests with low acceptance
    take more rounds, so it is the harmonic mean over requests of sum_{k=0..K} a_r^k.

    Args:
        acceptance_length: tau, bonus token included; in (1, K + 1).
        num_drafts: K.
        num_requests: Distinct requests, whose rates are spread evenly over the distribution; then they repeat.
        num_prompt_tokens: Of every request.
        num_tokens: Of every answer.
        seed: Of everything drawn.
        assumptions: The rest of the profile.

    Attributes:
        rates: [num_requests] a_r.
    """

    def __init__(
        self,
        acceptance_length: float,
        num_drafts: int,
        num_requests: int,
        num_prompt_tokens: int,
        num_tokens: int,
        seed: int,
        assumptions: Assumptions | None = None,
    ) -> None:
        if not 1 < acceptance_length < num_drafts + 1:
            raise ConfigError(
                f"acceptance_length={acceptance_length} is invalid: must be in (1, {num_drafts + 1}), "
                f"a bonus token and up to {num_drafts} drafts"
            )
        self.has_length_ratio = True
        self._num_drafts, self._seed = num_drafts, seed
        self._num_prompt_tokens, self._num_tokens = num_prompt_tokens, num_tokens
        self._made: dict[int, Answer] = {}
        self._assumptions = assumptions if assumptions is not None else Assumptions()
        spread = self._assumptions.spread_between_requests
        quantiles = (np.random.default_rng(seed).permutation(num_requests) + 0.5) / num_requests
        mean = _mean_rate(acceptance_length, num_drafts, spread, quantiles)
        self.rates = _beta_quantiles(mean, spread, quantiles)

    def __getitem__(self, index: int) -> Answer:
        number = index % len(self.rates)
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]

    def _make(self, number: int) -> Answer:
        rng = np.random.default_rng((self._seed, number))
        made_up, rate = self._assumptions, self.rates[number]
        shape = (self._num_tokens - 1, self._num_drafts)
        within = made_up.spread_within_request
        probability = rng.beta(max(rate * within, 1e-6), max((1 - rate) * within, 1e-6), shape)
        is_match = rng.random(shape) < probability
        num_matched = np.cumprod(is_match, axis=1, dtype=np.int64).sum(axis=1)
        clipped = np.clip(probability, _MIN_PROBABILITY, 1 - _MIN_PROBABILITY)
        logit = np.log(clipped / (1 - clipped)) + made_up.confidence_noise * rng.standard_normal(shape)
        expected = (1 + np.cumprod(probability, axis=1).sum(axis=1)) / (self._num_drafts + 1)
        ratio = np.clip(expected + made_up.ratio_noise * rng.standard_normal(shape[0]), 0.0, 1.0)
        confidence = (1 / (1 + np.exp(-logit))).astype(np.float32)
        return Answer(self._num_prompt_tokens, confidence, num_matched, ratio.astype(np.float32))


def _mean_rate(acceptance_length: float, num_drafts: int, spread: float, quantiles: Doubles) -> float:
    """Return the mean of the Beta at whose quantiles tokens over rounds are `acceptance_length`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        rates = _beta_quantiles(middle, spread, quantiles)
        lengths = (rates[:, None] ** np.arange(num_drafts + 1)).sum(axis=1)
        if 1 / np.mean(1 / lengths) < acceptance_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _beta_quantiles(mean: float, spread: float, quantiles: Doubles) -> Doubles:
    """Return quantiles of Beta(mean spread, (1 - mean) spread), from its density over the logit."""
    log_density = -mean * spread * np.logaddexp(0.0, -_LOGITS) - (1 - mean) * spread * np.logaddexp(0.0, _LOGITS)
    density = np.exp(log_density - log_density.max())
    cumulated = np.cumsum(density) - density / 2
    logits = np.interp(quantiles * density.sum(), cumulated, _LOGITS)
    return np.asarray(1 / (1 + np.exp(-logits)))
