# SPDX-License-Identifier: Apache-2.0
"""Decides whether a new drafter version stays: a sequential test of its acceptance against the last good one's.

Both versions serve at the same time, so that both see the same traffic. Host only; knows no weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist

from adaflash.errors import ConfigError

_PROMOTION_ERROR = 0.05  # of calling a candidate within the limit that is not; it merely drafts worse than it could


class Verdict(Enum):
    """What to do with the candidate."""

    UNDECIDED = "undecided"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True)
class CanaryConfig:
    """When a candidate is promoted or rolled back.

    Attributes:
        fraction: Share of new requests that the candidate drafts for, in (0, 1).
        max_drop: Relative drop of the acceptance length that is tolerated, in (0, 1).
        error_rate: Probability that a candidate whose drop is within the limit is ever rolled back, in (0, 0.5).
        min_requests: Requests of either version before anything is decided, >= 4.
        max_requests: Requests of the candidate after which it is promoted unless it has been found worse.

    Raises:
        ConfigError: Names the field, its value and what is allowed.
    """

    fraction: float = 0.25
    max_drop: float = 0.05
    error_rate: float = 1e-4
    min_requests: int = 12
    max_requests: int = 200

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("fraction", self.fraction, 1.0),
            ("max_drop", self.max_drop, 1.0),
            ("error_rate", self.error_rate, 0.5),
        ):
            if not 0 < value < limit:
                raise ConfigError(f"canary_{name}={value} is invalid: must be > 0 and < {limit:g}")
        if not 4 <= self.min_requests <= self.max_requests:
            allowed = f">= 4 and <= canary_max_requests={self.max_requests}"
            raise ConfigError(f"canary_min_requests={self.min_requests} is invalid: must be {allowed}")


class _Arm:
    """Rounds and tokens of every request of one version, and their sums of products."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_tokens = 0
        self._requests: dict[str, tuple[int, int]] = {}
        self._rounds_squared = self._tokens_squared = self._products = 0

    def observe(self, request_id: str, num_rounds: int, num_tokens: int) -> None:
        rounds, tokens = self._requests.get(request_id, (0, 0))
        self._add(rounds, tokens, -1)
        self._requests[request_id] = rounds + num_rounds, tokens + num_tokens
        self._add(rounds + num_rounds, tokens + num_tokens, 1)
        self.num_drafts += num_rounds
        self.num_tokens += num_tokens

    def _add(self, rounds: int, tokens: int, sign: int) -> None:
        self._rounds_squared += sign * rounds**2
        self._tokens_squared += sign * tokens**2
        self._products += sign * rounds * tokens

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def mean(self) -> float:
        """Acceptance length: tokens per round."""
        return self.num_tokens / self.num_drafts if self.num_drafts else math.nan

    @property
    def residual_squares(self) -> float:
        """Sum over requests of (tokens - mean * rounds)^2 / (mean rounds of a request)^2."""
        mean = self.mean
        squares = self._tokens_squared - 2 * mean * self._products + mean**2 * self._rounds_squared
        return max(squares, 0.0) / (self.num_drafts / self.num_requests) ** 2


class Canary:
    """Watches one candidate beside the last good version.

    With m_c and m_g the acceptance lengths of candidate and last good version, D = m_c - (1 - max_drop) m_g. The
    candidate is rolled back once D is negative with confidence 1 - error_rate, whenever that is looked at, by an
    asymptotic confidence sequence: with s^2 / n the variance of D and n the requests of the smaller arm, the bound is
    s sqrt(2 (n rho^2 + 1) / (n rho)^2 * log(sqrt(n rho^2 + 1) / error_rate)), rho tuned to n = 50, widened by the
    ratio of Student's to the normal quantile at n - 1. Rounds of a request are alike, so requests are what is
    independent: the variance is that of a ratio of sums over requests, pooled over the two arms, which differ little
    unless the candidate is bad.

    Source of the bound: Waudby-Smith et al., Time-uniform central limit theory and asymptotic confidence sequences
    (arXiv:2103.06476), theorem 2.2 with its one-sided form.
    """

    def __init__(self, config: CanaryConfig) -> None:
        self.config = config
        self.verdict = Verdict.UNDECIDED
        self._candidate, self._good = _Arm(), _Arm()

    @property
    def num_drafts(self) -> int:
        """Rounds that the candidate drafted."""
        return self._candidate.num_drafts

    @property
    def candidate_acceptance_length(self) -> float:
        """Tokens per round of the candidate; NaN before its first."""
        return self._candidate.mean

    @property
    def good_acceptance_length(self) -> float:
        """Tokens per round of the last good version meanwhile; NaN before its first."""
        return self._good.mean

    def observe(self, is_candidate: bool, request_id: str, num_rounds: int, num_tokens: int) -> Verdict:
        """Count drafted rounds whose context rows are all of the version that drafted.

        Args:
            is_candidate: Whether the candidate drafted them.
            request_id: The request they belong to.
            num_rounds: How many, >= 1.
            num_tokens: Tokens they emitted: accepted drafts and a bonus token each.
        """
        (self._candidate if is_candidate else self._good).observe(request_id, num_rounds, num_tokens)
        if self.verdict is Verdict.UNDECIDED:
            self.verdict = self._decide()
        return self.verdict

    def _decide(self) -> Verdict:
        candidate, good = self._candidate, self._good
        num_requests = min(candidate.num_requests, good.num_requests)
        if num_requests < self.config.min_requests:
            return Verdict.UNDECIDED
        kept = 1 - self.config.max_drop
        margin = candidate.mean - kept * good.mean
        pooled = (candidate.residual_squares + good.residual_squares) / (candidate.num_requests + good.num_requests - 2)
        variance = pooled * (1 / candidate.num_requests + kept**2 / good.num_requests)  # of D
        deviation = math.sqrt(num_requests * variance)
        if margin + deviation * _radius(num_requests, self.config.error_rate) < 0:
            return Verdict.ROLL_BACK
        is_good = margin - deviation * _radius(num_requests, _PROMOTION_ERROR) > 0
        return Verdict.PROMOTE if is_good or candidate.num_requests >= self.config.max_requests else Verdict.UNDECIDED


def _radius(num_observations: int, error_rate: float) -> float:
    """Return the half-width of the confidence sequence in standard deviations of one observation."""
    log_error = -2 * math.log(error_rate)
    rho_squared = (log_error + math.log(log_error + 1)) / 50
    scaled = num_observations * rho_squared + 1
    radius = math.sqrt(2 * scaled / (num_observations**2 * rho_squared) * math.log(math.sqrt(scaled) / error_rate))
    return radius * _student_ratio(num_observations - 1, error_rate)


def _student_ratio(degrees: int, error_rate: float) -> float:
    """Return Student's quantile over the normal one at 1 - error_rate, by the Cornish-Fisher expansion."""
    z = NormalDist().inv_cdf(1 - error_rate)
    return 1 + (z**2 + 1) / (4 * degrees) + (5 * z**4 + 16 * z**2 + 3) / (96 * degrees**2)
