# SPDX-License-Identifier: Apache-2.0
"""Training blocks: where they are anchored, what they are labelled with, and which keys their rows see. No weights.

Letters: B blocks, W draft block size, K = W - 1 labels a block, S tokens of a sequence, F packed feature rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from adaflash.speculative.drafter_config import LayerAttention


class TrainingSequence(NamedTuple):
    """Token ids [S] int64 and response mask [S] bool of one trajectory, on the host, without padding.

    Its feature rows are those of tokens 0 .. S - 2: no label needs the row of the last token.
    """

    token_ids: Tensor
    response_mask: Tensor


@dataclass(frozen=True)
class DraftBlocks:
    """Blocks [anchor, mask x K] of one or several sequences, ordered by sequence, then by anchor.

    Label k (column k - 1) is the token at anchor + k, without a shift: row k of the block predicts it, and the
    target's row at anchor + k - 1 is its teacher.

    Attributes:
        feature_lens: Feature rows of each sequence, S - 1; their sum is F.
        blocks_per_sequence: Number of blocks of each sequence; their sum is B.
        anchors: [B] int64 position of each anchor in its sequence.
        token_ids: [B, W] int64.
        positions: [B, W] int64, anchor + 0 .. K.
        label_token_ids: [B, K] int64 tokens of the trajectory; 0 where masked.
        label_mask: [B, K] bool, True for a leading run of response positions: where the response ends, so does the
            supervision of the block, as a served block ends there. Always True for the first label.
        teacher_rows: [B, K] int64 feature row behind each label, packed over sequences; any valid row where masked.
        context_positions: [F] int64 position of each feature row in its sequence.
    """

    feature_lens: tuple[int, ...]
    blocks_per_sequence: tuple[int, ...]
    anchors: Tensor
    token_ids: Tensor
    positions: Tensor
    label_token_ids: Tensor
    label_mask: Tensor
    teacher_rows: Tensor
    context_positions: Tensor

    def to(self, device: torch.device | str) -> DraftBlocks:
        """Return the blocks with every tensor on `device`."""
        return DraftBlocks(
            self.feature_lens,
            self.blocks_per_sequence,
            self.anchors.to(device),
            self.token_ids.to(device),
            self.positions.to(device),
            self.label_token_ids.to(device),
            self.label_mask.to(device),
            self.teacher_rows.to(device),
            self.context_positions.to(device),
        )


class BlockGroup(NamedTuple):
    """Neighbouring blocks of one sequence that attend in one call.

    `blocks` [begin, end) of B; `context` [begin, end) of F, the rows any of them sees.
    """

    blocks: tuple[int, int]
    context: tuple[int, int]


def sample_anchors(
    response_mask: Tensor,
    num_anchors: int,
    generator: torch.Generator,
    draft_block_size: int,
    max_position_embeddings: int | None = None,
) -> Tensor:
    """Draw anchors among the response positions whose next token is in the response too, without replacement.

    Serving anchors a block at an emitted token only, so the last prompt token is none. Blocks near the end of the
    response count as any other; they just have fewer labels.

    Args:
        response_mask: [S] bool, on the host.
        num_anchors: At most this many.
        generator: Of the host; its state decides everything.
        draft_block_size: W.
        max_position_embeddings: The drafter's; a block that reaches past it is never served, so it is not trained.

    Returns:
        [A] int64 ascending positions, 0 <= A <= num_anchors; empty when the response has fewer than two tokens.
    """
    eligible = (response_mask[:-1] & response_mask[1:]).nonzero().squeeze(1)
    if max_position_embeddings is not None:
        eligible = eligible[eligible + draft_block_size <= max_position_embeddings]
    chosen = torch.randperm(len(eligible), generator=generator)[:num_anchors]
    return eligible[chosen].sort().values


def make_blocks(
    sequences: Sequence[TrainingSequence], anchors: Sequence[Tensor], draft_block_size: int, mask_token_id: int
) -> DraftBlocks:
    """Build the blocks of some sequences.

    Args:
        sequences: At least one.
        anchors: For each sequence the ascending positions of its anchors, as `sample_anchors` returns them.
        draft_block_size: W.
        mask_token_id: Filler of the rows 1 .. W - 1.
    """
    feature_lens = tuple(len(sequence.token_ids) - 1 for sequence in sequences)
    offsets = accumulate(feature_lens[:-1], initial=0)
    offset_of_block = torch.cat([torch.full_like(a, offset) for a, offset in zip(anchors, offsets, strict=True)])
    labels = [_labels(*pair, draft_block_size - 1) for pair in zip(sequences, anchors, strict=True)]
    label_mask = torch.cat([mask for _, mask in labels])  # [B, K]
    anchor_ids = torch.cat([sequence.token_ids[a] for sequence, a in zip(sequences, anchors, strict=True)])
    token_ids = torch.full((len(anchor_ids), draft_block_size), mask_token_id)
    token_ids[:, 0] = anchor_ids
    packed_anchors = torch.cat(list(anchors))
    positions = packed_anchors[:, None] + torch.arange(draft_block_size)
    return DraftBlocks(
        feature_lens=feature_lens,
        blocks_per_sequence=tuple(len(a) for a in anchors),
        anchors=packed_anchors,
        token_ids=token_ids,
        positions=positions,
        label_token_ids=torch.cat([ids for ids, _ in labels]),
        label_mask=label_mask,
        teacher_rows=offset_of_block[:, None] + torch.where(label_mask, positions[:, :-1], packed_anchors[:, None]),
        context_positions=torch.cat([torch.arange(length) for length in feature_lens]),
    )


def _labels(sequence: TrainingSequence, anchors: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    """Return the label ids and their mask, each [A, num_labels]."""
    padding = torch.zeros(num_labels, dtype=torch.int64)
    positions = anchors[:, None] + torch.arange(1, num_labels + 1)
    supervised = torch.cat((sequence.response_mask, padding.bool()))[positions]
    mask = supervised.int().cumprod(dim=1).bool()
    return torch.cat((sequence.token_ids, padding))[positions] * mask, mask


def attention_groups(blocks: DraftBlocks, max_blocks: int) -> list[BlockGroup]:
    """Split the blocks into runs of at most `max_blocks` of a sequence, which see its context up to the last anchor."""
    groups = []
    first_block = first_row = 0
    anchors = blocks.anchors.tolist()
    for num_blocks, num_rows in zip(blocks.blocks_per_sequence, blocks.feature_lens, strict=True):
        last_block = first_block + num_blocks
        for begin in range(first_block, last_block, max_blocks):
            end = min(begin + max_blocks, last_block)
            groups.append(BlockGroup((begin, end), (first_row, first_row + anchors[end - 1])))
        first_block, first_row = last_block, first_row + num_rows
    return groups


def visibility(positions: Tensor, context_len: int, attention: LayerAttention) -> Tensor:
    """Return which keys the rows of some blocks of one sequence see: what serving shows each block by itself.

    Row i of a block sees the context strictly before its anchor and its own block, nothing of another block. A causal
    layer hides later rows of the own block; a window hides keys at positions <= own - window. Same rule as
    `Backend.paged_attention`.

    Args:
        positions: [G, W] int64 of the blocks, anchor first.
        context_len: C, keys of the context at positions 0 .. C - 1; at least the last anchor.
        attention: Of the layer.

    Returns:
        [G * W, C + G * W] bool, keys ordered [context | blocks].
    """
    num_blocks, width = positions.shape
    query = positions.reshape(-1, 1)  # [G * W, 1]
    context = torch.arange(context_len, device=positions.device)
    key = torch.cat((context, positions.flatten()))
    block = torch.arange(num_blocks, device=positions.device).repeat_interleave(width)
    before_anchor = context < positions[:, :1].repeat_interleave(width, dim=0)
    visible = torch.cat((before_anchor, block == block[:, None]), dim=1)
    if attention.causal:
        visible = visible & (key <= query)
    if attention.window is not None:
        visible = visible & (key > query - attention.window)
    return visible
