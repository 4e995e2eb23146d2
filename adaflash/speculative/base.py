# SPDX-License-Identifier: Apache-2.0
"""The drafter interface: what proposes tokens, whatever its architecture. Owns no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from adaflash.cache.kv_cache import KVCache
from adaflash.ops.metadata import PackedBatch, SamplingMetadata


@dataclass(frozen=True)
class DraftBlock:
    """Drafts of one step for S sequences; k is what was asked for, at most K = draft_block_size - 1.

    Attributes:
        token_ids: [S, k] int64, ids of the target's vocabulary; column i follows the anchor by i + 1 positions.
        logits: [S, k, Vd] the tokens were drawn from, penalties and bias not applied; kept only on request.
        confidence: [S, k] fp32 in (0, 1], the largest probability of each draft distribution: a property of the
            distribution, not of the drawn token, so that cutting by it is lossless under either coupling.
        length_ratio: [S] fp32, the length head's (accepted + 1) / W; None without one, and when k < K.
        hidden: [S, k + 1, H] drafter states after its final norm.
    """

    token_ids: Tensor
    logits: Tensor | None
    confidence: Tensor
    length_ratio: Tensor | None
    hidden: Tensor


class BlockStates(NamedTuple):
    """What a drafter's forward computes for S blocks, before anything is drawn.

    Attributes:
        hidden: [S, k + 1, H] drafter states after its final norm.
        logits: [S, k, Vd] of the drafts, -inf for the mask token.
        confidence: [S, k] fp32 in (0, 1], the largest probability of each draft distribution.
        length_ratio: [S] fp32 from the length head; None without one, and for blocks narrower than it was trained with.
    """

    hidden: Tensor
    logits: Tensor
    confidence: Tensor
    length_ratio: Tensor | None

    def first(self, num_seqs: int) -> BlockStates:
        """Return those of the first sequences."""
        return BlockStates(*(None if tensor is None else tensor[:num_seqs] for tensor in self))  # type: ignore[arg-type]


class LengthHead(ABC):
    """Predicts per block how much of it the target will accept."""

    @abstractmethod
    def predict(self, hidden: Tensor) -> Tensor:
        """Return the predicted (accepted + 1) / W per sequence, [S, W, H] -> [S] fp32 in (0, 1)."""


class Drafter(ABC):
    """Proposes a block of tokens after each sequence's anchor, from context it was fed by `write_context`.

    Attributes:
        version: Number of the weights being served; 0 is what came with the checkpoint.
        context_id: Identity of the weights that write context rows: drafters with the same one write the same rows, so
            that a version may go on with what another wrote.
        draft_block_size: W, anchor included: how wide blocks are that the weights were trained with, and at most.
        mask_token_id: Filler of the draft block; never proposed as a draft.
        tap_layer_ids: Target layers i whose output (HF `hidden_states[i + 1]`) feeds the context.
        max_position_embeddings: A block may not reach past this; beyond it a request decodes plainly.
        num_layers: Draft layers, each with its own KV.
        num_kv_heads: KV heads per layer.
        head_dim: Features per head.
        column_token_ids: [Vd] int64 target id of each logits column; None when the vocabulary is the target's.
        length_head: Predicts how much of a block will be accepted; None when the checkpoint has none.
    """

    version: int
    context_id: int
    draft_block_size: int
    mask_token_id: int
    tap_layer_ids: tuple[int, ...]
    max_position_embeddings: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    column_token_ids: Tensor | None
    length_head: LengthHead | None

    @abstractmethod
    def write_context(self, taps: Tensor, positions: Tensor, slot_mapping: Tensor, kv_: KVCache) -> None:
        """Turn target features into context K/V and write them to the drafter's cache.

        Args:
            taps: [T, len(tap_layer_ids) * H], the tapped layers' outputs side by side.
            positions: [T] int64 absolute positions.
            slot_mapping: [T] int64, all distinct.
            kv_: The drafter's cache, written in place.
        """

    @abstractmethod
    def block_states(self, batch: PackedBatch, kv_: KVCache) -> BlockStates:
        """Run the drafter over one block per sequence; nothing is decided on the host, so it can be captured.

        Args:
            batch: S sequences of exactly k + 1 tokens, `[anchor, mask x k]`, 1 <= k <= K (ADR 9); seq_lens count
                context + k + 1.
            kv_: The drafter's cache; the block's own K/V go to the lookahead slots of `batch.slot_mapping`.
        """

    @abstractmethod
    def choose(self, states: BlockStates, sampling: SamplingMetadata, keep_logits: bool = False) -> DraftBlock:
        """Draw the drafts.

        Args:
            states: What `block_states` returned.
            sampling: [S * k] rows, row s * k + i decides draft i of sequence s.
            keep_logits: Whether `DraftBlock.logits` is needed (coupling `rejection`).
        """

    def propose(
        self, batch: PackedBatch, kv_: KVCache, sampling: SamplingMetadata, keep_logits: bool = False
    ) -> DraftBlock:
        """Draft k tokens per sequence in one forward: `block_states`, then `choose`."""
        return self.choose(self.block_states(batch, kv_), sampling, keep_logits)

    @abstractmethod
    def take_weights(self, other: Drafter) -> None:
        """Become another version of the same shapes in place: addresses that a graph has captured stay.

        Args:
            other: Not packed.
        """
