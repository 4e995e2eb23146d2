# SPDX-License-Identifier: Apache-2.0
"""What drafts behind the end of a narrow block would have shown: as much as such drafts usually do. Host only."""

from __future__ import annotations

import numpy as np

from adaflash.speculative.allocation import FloatArray, IntArray
from adaflash.speculative.budget import DraftSignals

# Until a class has shown drafts of a position those of other classes count; until any has, an even chance does.
_MEMORY = 0.9  # per draft
_MIN_CONFIDENCE, _MAX_CONFIDENCE = 1e-4, 1 - 1e-4


class TypicalSignals:
    """Means of the confidence's logit by temperature class and position, and of the length ratio by class.

    They stand in for what a narrow block does not show, so that a wider one can be weighed. Nothing is verified, and so
    nothing is learned about survival, where they do.

    Args:
        num_positions: K.
        num_classes: Temperature classes.
    """

    def __init__(self, num_positions: int, num_classes: int) -> None:
        self._num_positions = num_positions
        self._logits = np.full((num_classes, num_positions), np.nan)
        self._ratios = np.full(num_classes, np.nan)

    def complete(self, signals: DraftSignals, classes: IntArray) -> tuple[FloatArray, FloatArray | None]:
        """Learn from the signals of n drafts of k <= K positions, and return them for K.

        Args:
            signals: Of a draft; a narrow block has no length ratio.
            classes: [n] temperature classes.

        Returns:
            Confidence [n, K], and length ratios [n] or None where no block ever had one.
        """
        shown = np.clip(np.array(signals.confidence), _MIN_CONFIDENCE, _MAX_CONFIDENCE)  # [n, k], NaN stays
        logits = np.log(shown / (1 - shown))
        width = shown.shape[1]
        for kind in set(classes.tolist()):
            rows = classes == kind
            mean = np.nan_to_num(logits[rows].mean(axis=0))
            _blend(self._logits[kind, :width], mean, _MEMORY ** int(rows.sum()))
            if signals.length_ratio is not None:
                ratio = np.array(signals.length_ratio)[rows].mean(keepdims=True)
                _blend(self._ratios[kind : kind + 1], ratio, _MEMORY ** int(rows.sum()))
        confidence = np.empty((len(classes), self._num_positions))
        confidence[:, :width] = signals.confidence
        if width < self._num_positions:
            confidence[:, width:] = self._typical_confidence(width)[classes]
        if signals.length_ratio is not None:
            return confidence, np.array(signals.length_ratio)
        return confidence, None if np.isnan(self._ratios).all() else self._ratios[classes]

    def _typical_confidence(self, first: int) -> FloatArray:
        """Return the confidence of positions from `first` on, [C, K - first]."""
        logits = self._logits[:, first:]
        known = ~np.isnan(logits)
        count = known.sum(axis=0)
        others = np.where(count > 0, np.where(known, logits, 0.0).sum(axis=0) / np.maximum(count, 1), 0.0)
        typical: FloatArray = 1 / (1 + np.exp(-np.where(known, logits, others)))
        return typical


def _blend(mean_: FloatArray, value: FloatArray, memory: float) -> None:
    mean_[:] = np.where(np.isnan(mean_), value, memory * mean_ + (1 - memory) * value)
