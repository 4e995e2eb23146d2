# SPDX-License-Identifier: Apache-2.0
"""Experience against promises: what drafting costs is taken for more while steps with drafts turn out to lose."""

from __future__ import annotations

_GAIN_MEMORY, _MAX_FACTOR = 0.95, 8.0
_LOSS_STEP, _GAIN_STEP, _IDLE_STEP = 1.05, 0.99, 0.999


class Caution:
    """A factor on the costs of drafting and verifying.

    It grows while steps with drafts commit fewer tokens than plain decoding would have in their time, whatever costs
    and survival promised; it shrinks while they gain, and slowly while there are none, so that drafting is tried again.

    Attributes:
        factor: In [1, 8].
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._gain = 0.0

    def judge(self, gain: float) -> None:
        """Take what a step with drafts gained over plain decoding, in tokens of each sequence."""
        self._gain = _GAIN_MEMORY * self._gain + (1 - _GAIN_MEMORY) * gain
        step = _LOSS_STEP if self._gain < 0 else _GAIN_STEP
        self.factor = min(_MAX_FACTOR, max(1.0, self.factor * step))

    def rest(self) -> None:
        """Take notice of a step without drafts."""
        self.factor = max(1.0, self.factor * _IDLE_STEP)
