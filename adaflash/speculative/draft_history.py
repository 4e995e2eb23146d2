# SPDX-License-Identifier: Apache-2.0
"""What past drafts promised, by sequence and by first drafts: the grounds on which it is decided who drafts at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adaflash.ops.compiled import compiled
from adaflash.speculative.allocation import FloatArray, IntArray

_NUM_OWN, _NUM_SHARED = 4, 24  # drafts remembered of a sequence; first and later ones of a temperature class
# What later drafts of all sequences showed counts as many drafts of its own: a good first draft, of a beginning that is
# easy to guess, promises too much.
_LATER_WEIGHT = 2.0


class Prospect(NamedTuple):
    """What a draft of each of n sequences can be expected to bring, for m lengths of drafts.

    Attributes:
        surplus: [m, n] expected accepted tokens beyond what verifying them costs, in tokens.
        tokens: [m, n] expected accepted tokens.
        rows: [m, n] expected drafts verified.
    """

    surplus: FloatArray
    tokens: FloatArray
    rows: FloatArray


# (confidence [n, K], classes [n], length ratio [n] or None) -> survival [n, K]
Predict = Callable[[FloatArray, IntArray, "FloatArray | None"], FloatArray]


class _Ring:
    """The last drafts of each of n things: what was known of them, and what that says by now.

    Attributes:
        survival: [n, size, K].
        num_added: [n] drafts so far.
    """

    def __init__(self, num: int, size: int, num_positions: int) -> None:
        self.survival = np.zeros((num, size, num_positions))
        self.num_added = np.zeros(num, dtype=np.int64)
        self._confidence = np.zeros((num, size, num_positions))
        self._ratio = np.full((num, size), np.nan)
        self._classes = np.zeros((num, size), dtype=np.int64)
        self._size = size

    @property
    def num_known(self) -> IntArray:
        """Drafts remembered of each, [n]."""
        return np.minimum(self.num_added, self._size)

    def add(self, index: int, kind: int, survival: FloatArray, confidence: FloatArray, ratio: float) -> None:
        place = index, int(self.num_added[index]) % self._size
        self.survival[place], self._confidence[place] = survival, confidence
        self._ratio[place], self._classes[place] = ratio, kind
        self.num_added[index] += 1

    def refresh(self, predict: Predict) -> None:
        known = np.arange(self._size) < self.num_known[:, None]
        if known.any():
            ratio = self._ratio[known]
            self.survival[known] = predict(
                self._confidence[known], self._classes[known], None if np.isnan(ratio).any() else ratio
            )

    def grow(self) -> None:
        for name in ("survival", "num_added", "_confidence", "_ratio", "_classes"):
            rows = getattr(self, name)
            setattr(self, name, np.concatenate((rows, np.zeros_like(rows))))


class DraftHistory:
    """Survivals of the last drafts. A draft promises sum_k max(0, survival_k - price), the mean of that counts.

    The mean of promises, not the promise of a mean: verifying follows the confidence of each draft, so that a
    sequence with some very good drafts among bad ones is worth drafting for.

    Args:
        num_positions: K.
        num_classes: Temperature classes; a new sequence is expected to do as the last ones of its class did at first.
    """

    def __init__(self, num_positions: int, num_classes: int) -> None:
        self._first = _Ring(num_classes, _NUM_SHARED, num_positions)
        self._later = _Ring(num_classes, _NUM_SHARED, num_positions)
        self._own = _Ring(16, _NUM_OWN, num_positions)
        self._slots: dict[int, int] = {}
        self._free = list(range(15, -1, -1))

    def num_drafts(self, keys: list[int]) -> IntArray:
        """Return how often each sequence drafted, [n]."""
        slots = [self._slots.get(key) for key in keys]
        return np.array([0 if slot is None else self._own.num_added[slot] for slot in slots])

    def add(
        self,
        keys: list[int],
        classes: IntArray,
        survival: FloatArray,
        confidence: FloatArray,
        length_ratio: FloatArray | None,
    ) -> None:
        """Remember a draft of each sequence, [n, K], and what was known of it."""
        ratios = np.full(len(keys), np.nan) if length_ratio is None else length_ratio
        for key, kind, *row in zip(keys, classes.tolist(), survival, confidence, ratios, strict=True):
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = self._take_slot()
            shared = self._later if self._own.num_added[slot] else self._first
            shared.add(kind, kind, *row)
            self._own.add(slot, kind, *row)

    def refresh(self, predict: Predict) -> None:
        """Predict the survival of all drafts anew: what confidence means has been learned meanwhile."""
        self._own.refresh(predict)
        self._first.refresh(predict)
        self._later.refresh(predict)

    def forget(self, key: int) -> None:
        """Drop a sequence that has ended."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._own.num_added[slot] = 0
            self._free.append(slot)

    def prospect(self, keys: list[int], classes: IntArray, caps: IntArray, price: float, lengths: IntArray) -> Prospect:
        """Return what drafts are expected to bring; nothing where no draft of the class is known.

        Args:
            keys: n sequences.
            classes: [n] their temperature classes.
            caps: [n] most drafts each may verify.
            price: Tokens that verifying one draft costs.
            lengths: [m] numbers of drafts to weigh, increasing, at most K.
        """
        slots = np.array([self._slots.get(key, -1) for key in keys])
        out = np.empty((3, len(lengths), len(keys)))
        _prospects(
            self._own.survival,
            self._own.num_added,
            self._first.survival,
            self._first.num_added,
            self._later.survival,
            self._later.num_added,
            slots,
            classes,
            caps,
            price,
            lengths,
            out,
        )
        return Prospect(*out)

    def surplus_after_first(self, kind: int, price: float, num_drafts: int) -> FloatArray:
        """Return what sequences may be expected to gain per draft, seeing their first, for the last of a class, [m]."""
        first, later = (_known_surplus(ring, kind, price, num_drafts) for ring in (self._first, self._later))
        if not len(later):
            return first
        expected: FloatArray = (first + _LATER_WEIGHT * later.mean()) / (1 + _LATER_WEIGHT)
        return expected

    def _take_slot(self) -> int:
        if not self._free:
            size = len(self._own.num_added)
            self._own.grow()
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()


def _known_surplus(ring: _Ring, kind: int, price: float, num_drafts: int) -> FloatArray:
    known = ring.survival[kind, : ring.num_known[kind], :num_drafts]
    surplus: FloatArray = np.maximum(known - price, 0.0).sum(axis=1)
    return surplus


_DRAFTS, _COUNTS, _INTS = "float64[:, :, ::1]", "int64[::1]", "int64[::1]"


@compiled(
    f"void({_DRAFTS}, {_COUNTS}, {_DRAFTS}, {_COUNTS}, {_DRAFTS}, {_COUNTS}, {_INTS}, {_INTS}, {_INTS}, float64, "
    "int64[::1], float64[:, :, ::1])"
)
def _prospects(
    own: FloatArray,
    num_own: IntArray,
    first: FloatArray,
    num_first: IntArray,
    later: FloatArray,
    num_later: IntArray,
    slots: IntArray,
    classes: IntArray,
    caps: IntArray,
    price: float,
    lengths: IntArray,
    prospect_: FloatArray,
) -> None:
    """Write surplus, tokens and rows of each length and sequence; a draft verifies what is above the price.

    Args:
        own: [slots, H, K] survivals of drafts of sequences.
        num_own: [slots] drafts added so far; the last H of them are there.
        first: [C, H', K] of first drafts by class.
        num_first: [C].
        later: [C, H', K] of other drafts by class.
        num_later: [C].
        slots: [n] of each sequence, -1 without drafts.
        classes: [n].
        caps: [n] most drafts verified.
        price: Tokens that verifying one draft costs.
        lengths: [m] increasing.
        prospect_: [3, m, n].
    """
    tokens, rows = np.empty(own.shape[2]), np.empty(own.shape[2])  # of each position
    for i in range(len(slots)):
        kind, cap, slot = classes[i], caps[i], slots[i]
        weight = 0.0
        tokens[:], rows[:] = 0.0, 0.0
        for source in range(2):  # its own drafts, or first drafts of others; then later drafts of others
            if source == 0:
                drafts = own[slot] if slot >= 0 else first[kind]
                count = min(num_own[slot], own.shape[1]) if slot >= 0 else min(num_first[kind], first.shape[1])
                each = 1.0
            else:
                drafts, count = later[kind], min(num_later[kind], later.shape[1])
                each = _LATER_WEIGHT / count if slot >= 0 and count > 0 else 0.0
            for h in range(count):
                for k in range(cap):
                    if drafts[h, k] <= price:
                        break
                    tokens[k] += each * drafts[h, k]
                    rows[k] += each
            weight += each * count
        scale = 1.0 / weight if weight > 0 else 0.0
        done, sum_tokens, sum_rows = 0, 0.0, 0.0
        for j in range(len(lengths)):
            for k in range(done, lengths[j]):
                sum_tokens += tokens[k] * scale
                sum_rows += rows[k] * scale
            done = lengths[j]
            prospect_[0, j, i] = sum_tokens - price * sum_rows
            prospect_[1, j, i] = sum_tokens
            prospect_[2, j, i] = sum_rows
