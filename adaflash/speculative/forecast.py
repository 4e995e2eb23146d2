# SPDX-License-Identifier: Apache-2.0
"""How many tokens a decoding sequence will take in the next steps, from the last ones."""

from __future__ import annotations

import math

_ALPHA = 0.3  # weight of the last step; AdaFlash's (SGLang pull request 34171)


class LengthForecast:
    """Moving averages of the tokens a sequence takes in a step, and of how far they lie from that.

    m <- (1 - a) m + a x and d <- (1 - a) d + a |x - m| for x tokens per decoding sequence in a step, a = 0.3. A
    forecast is for planning; what a step really takes is reserved when it is scheduled.

    Args:
        first: Tokens to expect before anything was seen: as many as a sequence can take.
    """

    def __init__(self, first: float) -> None:
        self._mean, self._deviation = first, 0.0

    def observe(self, num_tokens: int, num_seqs: int) -> None:
        """Take a step in which `num_seqs` > 0 decoding sequences took `num_tokens` together, drafts included."""
        tokens = num_tokens / num_seqs
        self._deviation = (1 - _ALPHA) * self._deviation + _ALPHA * abs(tokens - self._mean)
        self._mean = (1 - _ALPHA) * self._mean + _ALPHA * tokens

    @property
    def tokens_per_seq(self) -> int:
        """Tokens a sequence will seldom exceed on average over a batch: the mean and a deviation, rounded up."""
        return math.ceil(self._mean + self._deviation)
