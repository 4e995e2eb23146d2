# SPDX-License-Identifier: Apache-2.0
"""Seconds of a forward over its size, fitted to measurements and corrected size by size. Host only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adaflash.speculative.allocation import FloatArray, IntArray

# A knot far beyond every size continues the last segment, so that one `np.interp` also extrapolates.
_FAR = 1 << 30
# Shrinks terms that the samples cannot tell from the table to zero; too little to be seen in any other.
_RIDGE = 1e-4
# Later ones are small beside the whole.
_NUM_STEPS = 4
_MIN_SHARE = 0.01  # of the fastest sample: what the table is at least, however noisy the samples


class CostSample(NamedTuple):
    """One measured forward.

    Attributes:
        size: What the table runs over: packed tokens of a target forward, or rows of a draft forward.
        num_seqs: Sequences, where they cost beside the size; else 0.
        num_context: KV tokens of earlier steps that it read, all sequences together.
        seconds: How long it took.
    """

    size: int
    num_seqs: int
    num_context: int
    seconds: float


def knots_up_to(limit: int, row_multiple: int = 1) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, 24, ... below `limit`, and `limit`.

    Args:
        limit: >= 1.
        row_multiple: Where costs rise in steps of so many rows (`Backend.row_multiple`), the first steps get both their
            ends instead of sizes within them: for 4 it is 1, 2, 4, 5, 8, 9, 12, 13, 16, 17, 24, 32, ...
    """
    powers = [1 << exponent for exponent in range(limit.bit_length())]
    knots = {*powers, *(power * 3 // 2 for power in powers)}
    if row_multiple > 1:
        last = _NUM_STEPS * row_multiple
        ends = range(row_multiple, last + 1, row_multiple)
        knots = {1, 2, *ends, *(end + 1 for end in ends), *(knot for knot in knots if knot > last)}
    return sorted({knot for knot in knots if knot < limit} | {limit})


class CostTable:
    """seconds = (base(size) + per_seq_s * num_seqs + per_context_s * num_context) * exp(correction(size)).

    `base` is linear between knots and beyond the last one. `correction` is what was learned since: known at the knots
    that were corrected, linear in log(size) between those, and constant beyond them. So a correction of the only size
    that is ever run says nothing about how its cost compares with other sizes.

    Args:
        knots: [N] increasing sizes.
        base_s: [N] seconds, > 0.
        per_seq_s: Seconds per sequence.
        per_context_s: Seconds per KV token read.
        corrections: [N] logarithms of factors, NaN where nothing was learned; None is nothing at all.
    """

    def __init__(
        self,
        knots: Sequence[int],
        base_s: FloatArray,
        per_seq_s: float,
        per_context_s: float,
        corrections: FloatArray | None = None,
    ) -> None:
        assert len(knots) == len(base_s) > 0, "the table has knots, each with its seconds"
        self.knots = np.array(knots, dtype=np.int64)
        self.base_s = base_s
        self.per_seq_s = per_seq_s
        self.per_context_s = per_context_s
        self._corrections = np.full(len(knots), np.nan) if corrections is None else corrections
        self._knots_and_far = np.append(self.knots, _FAR).astype(np.float64)
        last_step = float(self.knots[-1] - self.knots[-2]) if len(knots) > 1 else 1.0
        self._far_steps = (_FAR - float(self.knots[-1])) / last_step
        self._log_knots = np.log(self.knots)
        self._midpoints = (self.knots[1:] + self.knots[:-1]) / 2
        self._refresh()

    @staticmethod
    def fit(samples: Sequence[CostSample], max_size: int, row_multiple: int = 1) -> CostTable:
        """Fit a table to samples by least squares of relative errors; sizes not sampled are interpolated.

        Args:
            samples: At least one. Terms that they do not tell apart, or that come out negative, are 0.
            max_size: The last knot.
            row_multiple: See `knots_up_to`.
        """
        assert samples, "a table needs a sample"
        assert all(math.isfinite(s.seconds) and s.seconds > 0 for s in samples), "a forward takes seconds > 0"
        sizes = np.unique([s.size for s in samples])
        fitted, per_seq_s, per_context_s = _solve(samples, sizes)
        fitted = np.maximum(fitted, _MIN_SHARE * min(s.seconds for s in samples))
        knots = knots_up_to(max_size, row_multiple)
        inside = np.interp(knots, sizes, fitted)
        beyond = np.maximum(np.array(knots) - sizes[-1], 0)
        return CostTable(knots, inside + beyond * _last_slope(sizes, fitted), per_seq_s, per_context_s)

    def seconds(self, sizes: IntArray, num_seqs: int, num_context: int) -> FloatArray:
        """Return the seconds at `sizes`, of any shape, > 0."""
        known = np.empty(len(self._knots_and_far))
        np.add(self.base_s, self.per_seq_s * num_seqs + self.per_context_s * num_context, out=known[:-1])
        known[:-1] *= self._factors
        rise = max(0.0, known[-2] - known[-3]) if len(known) > 2 else 0.0
        known[-1] = known[-2] + rise * self._far_steps
        return np.interp(sizes, self._knots_and_far, known)

    def nearest_knot(self, size: int) -> int:
        """Return the index of the knot nearest to `size`."""
        return int(np.searchsorted(self._midpoints, size))

    def correct(self, knot: int, step: float) -> None:
        """Multiply the seconds at a knot by exp(step); knots without a correction of their own follow."""
        self._corrections[knot] = self._filled[knot] + step
        self._refresh()

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {
            "knots": self.knots.tolist(),
            "base_s": self.base_s.tolist(),
            "per_seq_s": self.per_seq_s,
            "per_context_s": self.per_context_s,
            "corrections": [None if math.isnan(value) else value for value in self._corrections.tolist()],
        }

    @staticmethod
    def from_json(values: object) -> CostTable:
        """Return the table that `to_json` described.

        Raises:
            ValueError: Names what is missing or wrong.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a table is an object, not {values!r}")
        knots, base_s = _numbers(values, "knots"), _numbers(values, "base_s")
        corrections = _numbers(values, "corrections", or_null=True)
        if not len(knots) == len(base_s) == len(corrections) > 0:
            raise ValueError("knots, base_s and corrections must be of one length > 0")
        if knots[0] != 1 or (np.diff(knots) <= 0).any() or (knots % 1 != 0).any() or knots[-1] >= _FAR:
            raise ValueError(f"knots={knots.tolist()} is invalid: must be increasing integers that begin with 1")
        if (base_s <= 0).any():
            raise ValueError("base_s is invalid: must be > 0")
        terms = _numbers({"terms": [values.get("per_seq_s"), values.get("per_context_s")]}, "terms")
        if (terms < 0).any():
            raise ValueError("per_seq_s and per_context_s are invalid: must be >= 0")
        return CostTable([int(knot) for knot in knots], base_s, float(terms[0]), float(terms[1]), corrections)

    def _refresh(self) -> None:
        is_known = ~np.isnan(self._corrections)
        self._filled = np.zeros(len(self.knots))
        if is_known.any():
            self._filled = np.interp(self._log_knots, self._log_knots[is_known], self._corrections[is_known])
        self._factors = np.exp(self._filled)


def _solve(samples: Sequence[CostSample], sizes: IntArray) -> tuple[FloatArray, float, float]:
    """Return base seconds at `sizes` [m], and the seconds per sequence and per KV token, both >= 0."""
    weights = np.array([1 / s.seconds for s in samples])
    table = (np.array([s.size for s in samples])[:, None] == sizes).astype(np.float64)
    terms = np.array([(s.num_seqs, s.num_context) for s in samples], dtype=np.float64)  # [n, 2]
    scale = np.maximum((terms * weights[:, None]).max(axis=0), np.finfo(np.float64).tiny)
    used = [0, 1]
    while True:
        ridge = np.hstack([np.zeros((len(used), len(sizes))), np.diag(_RIDGE * scale[used])])
        left = np.vstack([np.hstack([table, terms[:, used]]) * weights[:, None], ridge])
        right = np.concatenate([np.ones(len(samples)), np.zeros(len(used))])
        norms = np.maximum(np.abs(left).max(axis=0), np.finfo(np.float64).tiny)
        solution = np.linalg.lstsq(left / norms, right, rcond=None)[0] / norms
        coefficients = solution[len(sizes) :]
        if (coefficients >= 0).all():
            break
        used.pop(int(np.argmin(coefficients * scale[used])))
    found = dict(zip(used, coefficients.tolist(), strict=True))
    return solution[: len(sizes)], found.get(0, 0.0), found.get(1, 0.0)


def _last_slope(sizes: IntArray, seconds: FloatArray) -> float:
    """Return seconds per size beyond the last one, from the last octave: neighbours may differ by noise alone."""
    if len(sizes) == 1:
        return 0.0
    before = max(int(np.searchsorted(sizes, sizes[-1] / 2, side="right")) - 1, 0)
    return max(0.0, float((seconds[-1] - seconds[before]) / (sizes[-1] - sizes[before])))


def _numbers(values: Mapping[str, object], key: str, or_null: bool = False) -> FloatArray:
    """Return a list of finite numbers; null is NaN where it is allowed."""
    given = values.get(key)
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise ValueError(f"{key}={given!r} is invalid: must be a list of numbers")
    numbers = [math.nan if item is None and or_null else item for item in given]
    for number, item in zip(numbers, given, strict=True):
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or (item is not None and not math.isfinite(number)):
            raise ValueError(f"{key} is invalid: it holds {item!r}, must be finite numbers")
    return np.array(numbers, dtype=np.float64)
