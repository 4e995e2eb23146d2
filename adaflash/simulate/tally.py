# SPDX-License-Identifier: Apache-2.0
"""Counts of a simulated run, and the figures that are reported of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Outcome:
    """What a policy did under a load; all but `num_tokens` is of the time in which it was measured.

    Attributes:
        policy: Its name.
        num_tokens: Tokens emitted in the whole run.
        measured_s: Seconds measured.
        tokens_per_s: Tokens emitted in them, per second.
        num_steps: Target steps.
        acceptance_length: Tokens per decode round, bonus token included; 0 without a round.
        verified_per_token: Drafts verified per token emitted.
        mean_step_s: Mean duration of a step.
        plain_share: Share of the steps with decoding sequences in which none drafted.
        inter_token_p50_s: Median over tokens of the time since the request's last emission over the tokens that came
            with it; first tokens of requests do not count.
        inter_token_p99_s: The 99th percentile of the same.
    """

    policy: str
    num_tokens: int
    measured_s: float
    tokens_per_s: float
    num_steps: int
    acceptance_length: float
    verified_per_token: float
    mean_step_s: float
    plain_share: float
    inter_token_p50_s: float
    inter_token_p99_s: float


@dataclass
class Tally:
    """Adds up a run.

    Args:
        policy: Name of the policy.
    """

    policy: str
    _num_tokens: int = 0
    _num_first_tokens: int = 0
    _steps_s: list[float] = field(default_factory=list)
    _num_decode_steps: int = 0
    _num_plain_steps: int = 0
    _num_verified: int = 0
    _num_emitted: list[int] = field(default_factory=list)  # per round
    _gaps_s: list[float] = field(default_factory=list)  # per round
    _closed_s: float | None = None

    def close(self, now_s: float) -> None:
        """End what is measured; called again, it changes nothing."""
        if self._closed_s is None:
            self._closed_s = now_s

    def add_step(self, elapsed_s: float, num_decoding: int, num_drafting: int) -> None:
        """Count a step."""
        if self._closed_s is None:
            self._steps_s.append(elapsed_s)
            self._num_decode_steps += num_decoding > 0
            self._num_plain_steps += num_decoding > 0 and num_drafting == 0

    def add_round(self, num_verified: int, num_emitted: int, gap_s: float) -> None:
        """Count a sequence's round, `gap_s` after the one before."""
        self._num_tokens += num_emitted
        if self._closed_s is None:
            self._num_verified += num_verified
            self._num_emitted.append(num_emitted)
            self._gaps_s.append(gap_s)

    def add_first_token(self) -> None:
        """Count the token that a prefill ends with."""
        self._num_tokens += 1
        self._num_first_tokens += self._closed_s is None

    def finish(self, now_s: float) -> Outcome:
        """Return the figures of a run that ends now."""
        measured_s = now_s if self._closed_s is None else self._closed_s
        emitted = np.array(self._num_emitted, dtype=np.int64)
        num_tokens = self._num_first_tokens + int(emitted.sum())
        p50, p99 = _percentiles(np.array(self._gaps_s) / np.maximum(emitted, 1), emitted, (0.5, 0.99))
        return Outcome(
            policy=self.policy,
            num_tokens=self._num_tokens,
            measured_s=measured_s,
            tokens_per_s=num_tokens / measured_s,
            num_steps=len(self._steps_s),
            acceptance_length=float(emitted.mean()) if len(emitted) else 0.0,
            verified_per_token=self._num_verified / num_tokens,
            mean_step_s=float(np.mean(self._steps_s)),
            plain_share=self._num_plain_steps / max(self._num_decode_steps, 1),
            inter_token_p50_s=p50,
            inter_token_p99_s=p99,
        )


def _percentiles(
    values: npt.NDArray[np.float64], weights: npt.NDArray[np.int64], shares: tuple[float, ...]
) -> list[float]:
    """Return the smallest values that so many of the weights do not exceed; 0 without any."""
    if not len(values):
        return [0.0] * len(shares)
    order = np.argsort(values)
    cumulated = np.cumsum(weights[order])
    return [float(values[order][np.searchsorted(cumulated, share * cumulated[-1])]) for share in shares]
