# SPDX-License-Identifier: Apache-2.0
"""What a step costs on this machine: profiled once, then corrected by every step. Host only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from adaflash.speculative.allocation import FloatArray, IntArray
from adaflash.speculative.cost_table import CostSample, CostTable

# The load of the machine is the mean of the middle 5 of the last 9 logarithms of observed / predicted; before the
# first forward those are 0, since the first ones are the likeliest to stall.
_LOAD_WINDOW, _LOAD_TRIM = 9, 2
# A forward is compared when at least 3 of the 8 before and 3 of the 8 after it are of another size or kind: where one
# size is rare it alone learns.
_REACH, _MIN_OTHERS = 8, 3
_GAIN, _MAX_STEP = 0.05, 0.01


class StepCosts(Protocol):
    """Seconds of a step's two parts, measured or calculated."""

    def verify_s(self, num_seqs: int, num_tokens: IntArray, num_context: int) -> FloatArray:
        """Return the seconds of everything of a step but drafting: target forward, acceptance, host.

        Args:
            num_seqs: Sequences in the step.
            num_tokens: [n] packed tokens.
            num_context: KV tokens of earlier steps that it reads, all sequences together.

        Returns:
            [n], > 0.
        """
        ...

    def draft_s(self, num_seqs: IntArray, num_context: int, num_drafts: IntArray | int) -> FloatArray:
        """Return the seconds of a draft forward.

        Args:
            num_seqs: Drafting sequences, of any shape.
            num_context: KV tokens of earlier steps that it reads, all sequences together.
            num_drafts: Drafts of each, of a shape that broadcasts with `num_seqs`.

        Returns:
            One for each pair; 0 where nothing drafts, infinite where nothing can be drafted at all.
        """
        ...


class _Observation(NamedTuple):
    """One forward: log(observed / predicted without load) at the knot nearest to its size."""

    table: CostTable
    knot: int
    log_ratio: float

    def is_alike(self, other: _Observation) -> bool:
        return self.table is other.table and self.knot == other.knot


class CostModel:
    """Measured `StepCosts`: two tables, and the load of the machine, which multiplies both.

    The load follows what is observed within a few steps, so that other work on the machine cancels in every decision.
    The tables learn slowly, and only by comparison: a forward is set against the last one before it that was of another
    size or kind, and against the first such one after it, and moves by the smaller difference. So nothing is learned
    where a single size runs, since there is nothing to compare it with, nor from the machine getting slower, even for
    a moment, since then one of the differences vanishes. Steps are bounded: one stall moves a size by 1 % at most,
    however long it was.

    Args:
        verify: Over packed tokens.
        draft: Over rows of draft blocks, anchors included; None where nothing can be drafted.
    """

    def __init__(self, verify: CostTable, draft: CostTable | None) -> None:
        self._verify = verify
        self._draft = draft
        self._log_load = 0.0
        self._latest = deque([0.0] * _LOAD_WINDOW, maxlen=_LOAD_WINDOW)  # log ratios
        self._recent: deque[_Observation] = deque(maxlen=2 * _REACH + 1)

    @staticmethod
    def from_samples(
        verify: Sequence[CostSample],
        draft: Sequence[CostSample],
        max_num_tokens: int,
        max_draft_rows: int,
        row_multiple: int = 1,
    ) -> CostModel:
        """Fit a model to measured forwards.

        Args:
            verify: At least one; `size` is the packed tokens.
            draft: `size` is the rows of all blocks, `num_seqs` 0; empty where nothing can be drafted.
            max_num_tokens: Most tokens a step may pack.
            max_draft_rows: Most rows of a draft forward.
            row_multiple: `Backend.row_multiple`.
        """
        draft_table = CostTable.fit(draft, max_draft_rows, row_multiple) if draft else None
        return CostModel(CostTable.fit(verify, max_num_tokens, row_multiple), draft_table)

    @property
    def load(self) -> float:
        """How many times longer than profiled everything takes now."""
        return math.exp(self._log_load)

    def verify_s(self, num_seqs: int, num_tokens: IntArray, num_context: int) -> FloatArray:
        """See `StepCosts.verify_s`."""
        return self._verify.seconds(num_tokens, num_seqs, num_context) * self.load

    def draft_s(self, num_seqs: IntArray, num_context: int, num_drafts: IntArray | int) -> FloatArray:
        """See `StepCosts.draft_s`."""
        rows = num_seqs * (num_drafts + 1)
        if self._draft is None:
            return np.where(rows > 0, np.inf, 0.0)
        return np.where(rows > 0, self._draft.seconds(rows, 0, num_context) * self.load, 0.0)

    def observe_verify(self, num_seqs: int, num_tokens: int, num_context: int, seconds: float) -> None:
        """Learn from a step: what it packed, and the seconds of everything but drafting."""
        self._observe(self._verify, num_tokens, num_seqs, num_context, seconds)

    def observe_draft(self, num_rows: int, num_context: int, seconds: float) -> None:
        """Learn from a draft forward of so many rows, anchors included."""
        assert self._draft is not None, "what has drafted was profiled drafting"
        self._observe(self._draft, num_rows, 0, num_context, seconds)

    def to_json(self) -> dict[str, object]:
        """Return what was profiled and learned as plain JSON values; the load is of the moment and left out."""
        return {"verify": self._verify.to_json(), "draft": None if self._draft is None else self._draft.to_json()}

    @staticmethod
    def from_json(values: object) -> CostModel:
        """Return the model that `to_json` described.

        Raises:
            ValueError: Names what is missing or wrong.
        """
        if not isinstance(values, Mapping) or not {"verify", "draft"} <= set(values):
            raise ValueError("a cost model is an object with verify and draft")
        draft = values["draft"]
        return CostModel(CostTable.from_json(values["verify"]), None if draft is None else CostTable.from_json(draft))

    def _observe(self, table: CostTable, size: int, num_seqs: int, num_context: int, seconds: float) -> None:
        assert math.isfinite(seconds), f"a forward takes finite seconds, not {seconds}"
        assert seconds > 0, f"a forward takes seconds > 0, not {seconds}"
        assert size > 0, f"a forward has a size > 0, not {size}"
        predicted = float(table.seconds(np.array([size]), num_seqs, num_context)[0])
        log_ratio = math.log(seconds / predicted)
        self._latest.append(log_ratio)
        middle = sorted(self._latest)[_LOAD_TRIM:-_LOAD_TRIM]
        self._log_load = sum(middle) / len(middle)
        self._recent.append(_Observation(table, table.nearest_knot(size), log_ratio))
        if len(self._recent) == self._recent.maxlen:
            self._learn()

    def _learn(self) -> None:
        """Move the table at the window's central forward towards its neighbours, if it differs from both alike."""
        recent = list(self._recent)
        centre = recent[_REACH]
        before = [one.log_ratio for one in recent[:_REACH] if not one.is_alike(centre)]
        after = [one.log_ratio for one in recent[_REACH + 1 :] if not one.is_alike(centre)]
        if min(len(before), len(after)) < _MIN_OTHERS:
            return
        differences = (centre.log_ratio - before[-1], centre.log_ratio - after[0])
        if differences[0] * differences[1] > 0:
            step = _GAIN * min(differences, key=abs)
            centre.table.correct(centre.knot, max(-_MAX_STEP, min(_MAX_STEP, step)))
