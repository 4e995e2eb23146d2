# SPDX-License-Identifier: Apache-2.0
"""Anchors, labels and masks of training blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaflash.ops.reference import attention_mask
from adaflash.speculative.drafter_config import LayerAttention
from adaflash.training.blocks import (
    DraftBlocks,
    TrainingSequence,
    attention_groups,
    make_blocks,
    sample_anchors,
    visibility,
)

WIDTH, MASK_ID = 4, 99
ATTENTIONS = {
    "full": LayerAttention(causal=False, window=None),
    "causal": LayerAttention(causal=True, window=None),
    "sliding": LayerAttention(causal=True, window=3),
    "sliding_non_causal": LayerAttention(causal=False, window=3),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sequence(num_prompt_tokens: int, num_response_tokens: int, first_id: int = 0) -> TrainingSequence:
    length = num_prompt_tokens + num_response_tokens
    return TrainingSequence(torch.arange(first_id, first_id + length), torch.arange(length) >= num_prompt_tokens)


def blocks_at(*anchors: list[int], sequences: list[TrainingSequence]) -> DraftBlocks:
    return make_blocks(sequences, [torch.tensor(a, dtype=torch.int64) for a in anchors], WIDTH, MASK_ID)


@given(mask=st.lists(st.booleans(), min_size=1, max_size=40), num_anchors=st.integers(1, 50), seed=st.integers(0, 5))
def test_anchors_are_distinct_response_positions_with_a_supervised_next_token(
    mask: list[bool], num_anchors: int, seed: int
) -> None:
    response_mask = torch.tensor(mask)
    anchors = sample_anchors(response_mask, num_anchors, generator(seed), WIDTH)
    eligible = [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]
    assert set(anchors.tolist()) <= set(eligible)
    assert anchors.tolist() == sorted(set(anchors.tolist()))
    assert len(anchors) == min(num_anchors, len(eligible))


def test_the_generator_alone_decides_the_anchors() -> None:
    mask = torch.ones(200, dtype=torch.bool)
    first = sample_anchors(mask, 20, generator(1), WIDTH)
    torch.rand(5)
    assert torch.equal(sample_anchors(mask, 20, generator(1), WIDTH), first)
    assert not torch.equal(sample_anchors(mask, 20, generator(2), WIDTH), first)


def test_every_eligible_position_is_drawn_about_as_often_as_any_other() -> None:
    mask = torch.arange(12) >= 2
    rng = generator()
    counts = torch.zeros(12)
    for _ in range(900):
        counts[sample_anchors(mask, 3, rng, WIDTH)] += 1
    assert not counts[:2].any()
    assert counts[11] == 0  # nothing follows it
    torch.testing.assert_close(counts[2:11], torch.full((9,), 300.0), atol=60, rtol=0)  # 4 standard deviations


def test_a_block_that_would_reach_past_the_drafters_positions_is_not_drawn() -> None:
    mask = torch.ones(20, dtype=torch.bool)
    assert sample_anchors(mask, 99, generator(), WIDTH).max() == 18
    assert sample_anchors(mask, 99, generator(), WIDTH, max_position_embeddings=20).max() == 16


def test_a_block_is_labelled_with_what_follows_its_anchor() -> None:
    blocks = blocks_at([5, 8], sequences=[sequence(4, 8, first_id=20)])
    assert blocks.token_ids.tolist() == [[25, 99, 99, 99], [28, 99, 99, 99]]
    assert blocks.positions.tolist() == [[5, 6, 7, 8], [8, 9, 10, 11]]
    assert blocks.label_token_ids.tolist() == [[26, 27, 28], [29, 30, 31]]
    assert blocks.teacher_rows.tolist() == [[5, 6, 7], [8, 9, 10]]  # the target's row before each label
    assert blocks.label_mask.all()


def test_the_last_blocks_have_fewer_labels() -> None:
    blocks = blocks_at([8, 9, 10], sequences=[sequence(4, 8)])
    assert blocks.label_mask.tolist() == [[True, True, True], [True, True, False], [True, False, False]]
    assert blocks.label_token_ids.tolist() == [[9, 10, 11], [10, 11, 0], [11, 0, 0]]


def test_supervision_ends_with_the_response_and_does_not_resume_in_the_next_turn() -> None:
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    blocks = blocks_at([1, 2], sequences=[TrainingSequence(torch.arange(7), mask)])
    assert blocks.label_mask.tolist() == [[True, True, False], [True, False, False]]


def test_padding_is_never_a_label() -> None:
    padded = TrainingSequence(torch.arange(12), torch.tensor([False] * 3 + [True] * 5 + [False] * 4))
    anchors = sample_anchors(padded.response_mask, 99, generator(), WIDTH)
    blocks = make_blocks([padded], [anchors], WIDTH, MASK_ID)
    labels = (blocks.anchors[:, None] + torch.arange(1, WIDTH))[blocks.label_mask]
    assert labels.max() == 7
    assert blocks.label_mask[:, 0].all()


def test_rows_of_several_sequences_are_packed() -> None:
    sequences = [sequence(2, 5, 10), sequence(1, 1, 50), sequence(3, 6, 100)]
    blocks = blocks_at([3], [], [4, 6], sequences=sequences)
    assert blocks.feature_lens == (6, 1, 8)
    assert blocks.blocks_per_sequence == (1, 0, 2)
    assert blocks.context_positions.tolist() == [*range(6), 0, *range(8)]
    assert blocks.teacher_rows.tolist() == [[3, 4, 5], [11, 12, 13], [13, 14, 13]]
    assert blocks.token_ids[:, 0].tolist() == [13, 104, 106]
    packed = torch.cat([s.token_ids[1:] for s in sequences])  # what each feature row predicts
    assert torch.equal(packed[blocks.teacher_rows] * blocks.label_mask, blocks.label_token_ids)


def test_groups_cover_all_blocks_once_and_stay_within_a_sequence() -> None:
    blocks = blocks_at([2, 4, 5], [], [3, 4], sequences=[sequence(2, 6), sequence(1, 1), sequence(3, 6)])
    assert attention_groups(blocks, 2) == [((0, 2), (0, 4)), ((2, 3), (0, 5)), ((3, 5), (8, 12))]
    assert attention_groups(blocks, 99) == [((0, 3), (0, 5)), ((3, 5), (8, 12))]


def served_mask(anchor: int, attention: LayerAttention) -> Tensor:
    """What serving shows a block alone: [W, anchor + W]."""
    return attention_mask(WIDTH, anchor + WIDTH, attention.causal, attention.window, torch.device("cpu"))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_block_sees_what_it_sees_when_served_and_nothing_of_other_blocks(name: str) -> None:
    attention = ATTENTIONS[name]
    anchors = [2, 3, 7]
    positions = torch.tensor(anchors)[:, None] + torch.arange(WIDTH)
    context_len = 9
    visible = visibility(positions, context_len, attention).view(3, WIDTH, -1)
    for index, anchor in enumerate(anchors):
        context, own = served_mask(anchor, attention).split([anchor, WIDTH], dim=1)
        expected = torch.zeros(WIDTH, context_len + 3 * WIDTH, dtype=torch.bool)
        expected[:, :anchor] = context
        begin = context_len + index * WIDTH
        expected[:, begin : begin + WIDTH] = own
        assert torch.equal(visible[index], expected)
    assert visible.any(-1).all(), "every row sees at least itself"


def test_no_context_is_no_error() -> None:
    visible = visibility(torch.arange(WIDTH)[None], 0, ATTENTIONS["full"])
    assert visible.shape == (WIDTH, WIDTH)
    assert visible.all()
