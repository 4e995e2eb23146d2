# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request verifies. Host only: sees confidences and limits, never a drafted token or a tensor.

Every policy decides from the draft *distributions* (confidence, length head), so cutting the block keeps sampling
lossless under either coupling (see `Backend.verify_drafts`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftSignals:
    """What the policies may look at, for S drafting sequences.

    Attributes:
        confidence: [S][k] largest probability of each draft distribution; k <= K drafts were made.
        length_ratio: [S] predicted (accepted + 1) / W of the length head; None without one, and when k < K.
    """

    confidence: list[list[float]]
    length_ratio: list[float] | None


@dataclass(frozen=True)
class VerifyPolicy:
    """Turns draft signals into verify lengths.

    Attributes:
        name: `off`, `fixed`, `confidence` or `length_head`.
        draft_block_size: W.
        confidence_threshold: `confidence` keeps the prefix whose cumulative confidence is at least this.
        length_head_rate: Multiplies the head's prediction.
        length_head_min: Smallest candidate length, anchor included.
    """

    name: str
    draft_block_size: int
    confidence_threshold: float = 0.3
    length_head_rate: float = 1.0
    length_head_min: int = 1

    def choose(self, signals: DraftSignals, max_drafts: list[int]) -> list[int]:
        """Return how many drafts each sequence verifies, between 0 and its entry of `max_drafts`."""
        if self.name == "fixed":
            return list(max_drafts)
        if self.name == "confidence":
            return [self._by_confidence(c, cap) for c, cap in zip(signals.confidence, max_drafts, strict=True)]
        assert self.name == "length_head", f"policy {self.name} does not draft"
        assert signals.length_ratio is not None, "policy length_head needs a drafter with a length head"
        return [self._by_ratio(ratio, cap) for ratio, cap in zip(signals.length_ratio, max_drafts, strict=True)]

    def _by_confidence(self, confidence: list[float], cap: int) -> int:
        survival, kept = 1.0, 0
        for probability in confidence[:cap]:
            survival *= probability
            if survival < self.confidence_threshold:
                break
            kept += 1
        return kept

    def _by_ratio(self, ratio: float, cap: int) -> int:
        """Candidate = clamp(round(ratio * W * rate), min, W), anchor included (AdaFlash serving rule)."""
        width = self.draft_block_size
        candidate = round(ratio * width * self.length_head_rate)
        return min(max(candidate, self.length_head_min, 1), width, cap + 1) - 1
