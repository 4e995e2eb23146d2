# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaflash.ops.graph_shapes import GraphBuckets, GraphShape

SIZES = st.sets(st.integers(1, 40), min_size=1).map(lambda sizes: tuple(sorted(sizes)))


@st.composite
def buckets(draw: st.DrawFn) -> GraphBuckets:
    fewest = draw(st.integers(0, 2))
    return GraphBuckets(draw(SIZES), draw(SIZES), fewest, draw(st.integers(max(fewest, 1), 16)))


@given(buckets(), st.integers(1, 20), st.integers(0, 30))
def test_a_batch_is_filled_up_to_the_smallest_shape_that_dummies_can_fill(
    buckets: GraphBuckets, num_seqs: int, num_more: int
) -> None:
    num_tokens = num_seqs + num_more
    possible = [
        (tokens, seqs)
        for tokens in buckets.num_tokens
        for seqs in buckets.num_seqs
        if tokens >= num_tokens
        and seqs >= num_seqs
        and (seqs - num_seqs) * buckets.min_dummy_len
        <= tokens - num_tokens
        <= (seqs - num_seqs) * buckets.max_dummy_len
    ]
    shape = buckets.fit(num_seqs, num_tokens)
    if not possible:
        assert shape is None
        return
    assert shape is not None
    assert (shape.num_tokens, shape.num_seqs) == min(possible)
    lens = buckets.dummy_lens(shape, num_seqs, num_tokens)
    assert len(lens) == shape.num_seqs - num_seqs
    assert sum(lens) == shape.num_tokens - num_tokens
    assert all(buckets.min_dummy_len <= length <= buckets.max_dummy_len for length in lens)


@pytest.mark.parametrize(("num_seqs", "expected"), [(1, (2, 16)), (2, (2, 16)), (3, (5, 40)), (5, (5, 40)), (6, None)])
def test_blocks_of_drafts_are_filled_up_with_blocks_as_wide(num_seqs: int, expected: tuple[int, int] | None) -> None:
    shape = GraphBuckets((2, 5), (8,), 1, 16).fit_uniform(num_seqs, 8)
    assert shape == (None if expected is None else GraphShape(*expected))
