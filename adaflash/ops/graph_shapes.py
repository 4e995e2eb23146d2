# SPDX-License-Identifier: Apache-2.0
"""In which shapes a device captures forwards, and how a batch is filled up to one of them. Host only.

A captured forward has a fixed number of sequences and of tokens. A batch gets dummy sequences until it has both: their
rows go to blocks of the KV pool that belong to nobody, and what is computed for them is dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple


class GraphShape(NamedTuple):
    """Sequences and packed tokens of a captured forward."""

    num_seqs: int
    num_tokens: int


@dataclass(frozen=True)
class GraphBuckets:
    """The shapes a device captures.

    Attributes:
        num_seqs: Ascending.
        num_tokens: Ascending.
        min_dummy_len: Rows a dummy sequence has at least: 0 where kernels take empty sequences, else 1.
        max_dummy_len: Rows a dummy sequence has at most.
    """

    num_seqs: tuple[int, ...]
    num_tokens: tuple[int, ...]
    min_dummy_len: int
    max_dummy_len: int

    def __post_init__(self) -> None:
        for sizes in (self.num_seqs, self.num_tokens):
            assert list(sizes) == sorted(set(sizes)), "buckets are ascending"
            assert all(size > 0 for size in sizes), "buckets are positive"
        assert 0 <= self.min_dummy_len <= self.max_dummy_len, "a dummy has a range of rows"
        assert self.max_dummy_len > 0, "a dummy can have rows"

    def fit(self, num_seqs: int, num_tokens: int) -> GraphShape | None:
        """Return the smallest shape, fewest tokens first, that a batch can be filled up to; None where none fits."""
        for tokens in self.num_tokens[bisect_left(self.num_tokens, num_tokens) :]:
            for seqs in self.num_seqs[bisect_left(self.num_seqs, num_seqs) :]:
                num_dummies = seqs - num_seqs
                fewest, most = num_dummies * self.min_dummy_len, num_dummies * self.max_dummy_len
                if fewest <= tokens - num_tokens <= most:
                    return GraphShape(seqs, tokens)
        return None

    def fit_uniform(self, num_seqs: int, width: int) -> GraphShape | None:
        """Return the smallest shape of sequences that all have `width` rows, dummies too; None where none fits."""
        index = bisect_left(self.num_seqs, num_seqs)
        if index == len(self.num_seqs):
            return None
        return GraphShape(self.num_seqs[index], self.num_seqs[index] * width)

    def dummy_lens(self, shape: GraphShape, num_seqs: int, num_tokens: int) -> list[int]:
        """Return the rows of each dummy sequence that fills a batch up to `shape`, which `fit` returned for it."""
        num_dummies, num_rows = shape.num_seqs - num_seqs, shape.num_tokens - num_tokens
        lens = [self.min_dummy_len] * num_dummies
        left = num_rows - sum(lens)
        for i in range(num_dummies):
            more = min(left, self.max_dummy_len - self.min_dummy_len)
            lens[i] += more
            left -= more
        assert left == 0, "the shape fits"
        return lens
