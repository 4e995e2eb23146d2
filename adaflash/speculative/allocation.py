# SPDX-License-Identifier: Apache-2.0
"""Which drafts of a batch are worth verifying: the split of a step's rows that yields most tokens per second."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Allocation(NamedTuple):
    """Verify lengths of S sequences.

    Attributes:
        lens: [S] leading drafts each sequence verifies.
        expected_tokens: Tokens the step is expected to commit.
        goodput: The same per second of the step.
    """

    lens: list[int]
    expected_tokens: float
    goodput: float


def allocate(survival: FloatArray, caps: IntArray, step_s: FloatArray, num_certain: float) -> Allocation:
    """Maximise (num_certain + sum of the survivals of what is verified) / step_s[number of drafts verified].

    Exact. For a given number b of drafts no choice can expect more than the b largest survivals together; since
    survivals do not grow along a sequence those b can be taken as prefixes, so they are allowed. All b are tried: the
    cost may be any function of b (buckets, steps), not only a convex one. A draft that costs nothing is taken.

    Args:
        survival: [S, K] probability that the target accepts draft k and all before it; non-increasing along K.
        caps: [S] most drafts each sequence may verify, in [0, K].
        step_s: [sum of caps + 1] seconds of the step by number of drafts; infinite where it must not be.
        num_certain: Tokens the step commits whatever happens, one for every sequence that decodes.
    """
    num_seqs, width = survival.shape
    owner, position = np.nonzero(np.arange(width) < caps[:, None])  # row by row, so that equal ones stay prefixes
    marginal = survival[owner, position]
    order = np.argsort(-marginal, kind="stable")
    expected = np.empty(len(order) + 1)
    expected[0] = num_certain
    np.cumsum(marginal[order], out=expected[1:])
    expected[1:] += num_certain
    goodput = expected / step_s
    best = len(goodput) - 1 - int(np.argmax(goodput[::-1]))
    lens = np.bincount(owner[order[:best]], minlength=num_seqs)
    return Allocation(lens.tolist(), float(expected[best]), float(goodput[best]))
