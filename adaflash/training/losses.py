# SPDX-License-Identifier: Apache-2.0
"""What the drafter and its length head minimise, over blocks; single rows are `row_losses`' business.

Letters: B blocks, W draft block size, K = W - 1 labels a block, H hidden, Vd columns of the draft head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from adaflash.errors import ConfigError
from adaflash.speculative.base import LengthHead
from adaflash.training.position_weights import DecayWeights, PositionWeights
from adaflash.training.row_losses import CHUNK_ELEMENTS, Divergence, DraftHead, RowLosses, RowObjective, row_losses


@dataclass(frozen=True)
class TermClip:
    """Clip each vocabulary term of the divergence before the sum, whatever else is in the batch.

    Source: AdaFlash (arXiv:2607.19223).

    Attributes:
        max_nats: Upper limit of a term.
    """

    max_nats: float = 0.5

    def __post_init__(self) -> None:
        if not self.max_nats > 0:
            raise ConfigError(f"max_nats={self.max_nats} is invalid: must be > 0")


@dataclass(frozen=True)
class PositionClip:
    """Clip a position's whole divergence, divided by the batch's normaliser n: min(D / n, max_share).

    That is a limit of max_share * n nats, so it depends on how much is in the batch, and a clipped position loses its
    whole gradient; kept to compare with. Source: AdaFlash's published training code, which does this, not `TermClip`.

    Attributes:
        max_share: Upper limit of D / n.
    """

    max_share: float = 0.01

    def __post_init__(self) -> None:
        if not self.max_share > 0:
            raise ConfigError(f"max_share={self.max_share} is invalid: must be > 0")


@dataclass(frozen=True)
class LossOutput:
    """The loss of a batch of blocks and what it was made of; only `loss` carries a gradient.

    To accumulate over parts of a batch, add up `loss * normaliser` and divide by the sum of the normalisers (under
    `PositionClip` the limits are then those of the parts).

    Attributes:
        loss: [] fp32.
        normaliser: [] fp32, what the weighted sum over positions was divided by; 0 without labels.
        weights: [B, K] fp32 of the positions; 0 where masked, as all below but `draft_columns`.
        cross_entropy: [B, K] fp32 in nats; 0 where the label cannot be drafted.
        divergence: [B, K] fp32 in nats, as clipped; None at alpha = 1.
        clipped: [B, K] fp32 share of the vocabulary terms whose gradient the clip removed.
        draft_columns: [B, K] int64 greedy draft, -1 where masked.
        agreed: [B, K] bool, whether that draft is the label.
        label_mask: [B, K] bool, as given.
    """

    loss: Tensor
    normaliser: Tensor
    weights: Tensor
    cross_entropy: Tensor
    divergence: Tensor | None
    clipped: Tensor
    draft_columns: Tensor
    agreed: Tensor
    label_mask: Tensor

    def agreement(self) -> Tensor:
        """Return the share of labels each position drafts greedily, [K] fp32; NaN at a position without labels."""
        return self.agreed.sum(0) / self.label_mask.sum(0)

    def clipped_terms(self) -> Tensor:
        """Return the share of all vocabulary terms that were clipped, [] fp32; NaN without labels."""
        return self.clipped.sum() / self.label_mask.sum()


@dataclass(frozen=True)
class DraftLoss:
    """sum_{b,k} w_bk (alpha CE_bk + (1 - alpha) D_bk) / normaliser over the supervised positions of blocks.

    CE is the cross-entropy on the target's top-1 token, D a clipped divergence between the draft's and the target's
    distributions (`row_losses`), w and the normaliser come from `weighting`. A position whose label lies outside a
    reduced vocabulary has no CE and keeps its place in the normaliser, so that it does not make others count more.

    Source: AdaFlash (arXiv:2607.19223) with the defaults; OSD (arXiv:2310.07177) is alpha=0,
    divergence="forward_kl", clip=None.

    Attributes:
        alpha: Weight of the cross-entropy, in [0, 1].
        divergence: Direction: reverse is KL(draft || target).
        clip: How the divergence is limited; None does not.
        weighting: Weights of the positions.
        chunk_elements: Logits that may exist at once; changes time and memory only.

    Raises:
        ConfigError: A field is out of its range.
    """

    alpha: float = 0.8
    divergence: Divergence = "reverse_kl"
    clip: TermClip | PositionClip | None = field(default_factory=TermClip)
    weighting: PositionWeights = field(default_factory=DecayWeights)
    chunk_elements: int = CHUNK_ELEMENTS

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} is invalid: must be in [0, 1]")
        if self.divergence not in ("reverse_kl", "forward_kl"):
            raise ConfigError(f"divergence={self.divergence!r} is invalid: must be 'reverse_kl' or 'forward_kl'")
        if self.chunk_elements < 1:
            raise ConfigError(f"chunk_elements={self.chunk_elements} is invalid: must be >= 1")

    def __call__(
        self, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor, label_mask: Tensor, head: DraftHead
    ) -> LossOutput:
        """Compute the loss; its gradient reaches `hidden` only.

        Args:
            hidden: [B, K, H] final hidden states of the drafter's rows 1 .. K.
            target_hidden: [B, K, H] last hidden states of the target at the position before each label; may be None
                at alpha = 1.
            labels: [B, K] int64, `head.columns` of the target's top-1 token over its full vocabulary; -1 for one that
                cannot be drafted. Ignored where masked.
            label_mask: [B, K] bool, a leading run in each block.
            head: The target's LM head.
        """
        active = label_mask.flatten().nonzero().squeeze(1)  # [N]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        normaliser = self.weighting.normaliser(label_mask, dtype)
        rows = row_losses(
            hidden.flatten(0, 1)[active],
            None if target_hidden is None else target_hidden.flatten(0, 1)[active],
            labels.flatten()[active],
            head,
            self._row_objective(normaliser),
        )
        return self._weigh(_spread(rows, active, label_mask), normaliser, labels, label_mask)

    def _weigh(self, rows: RowLosses, normaliser: Tensor, labels: Tensor, label_mask: Tensor) -> LossOutput:
        """Weigh rows laid out as [B, K]."""
        known = label_mask & (labels >= 0)
        weights = self.weighting.weights((-rows.cross_entropy).exp(), known, label_mask)
        return LossOutput(
            loss=(weights * rows.loss).sum() / normaliser.clamp_min(1e-6),
            normaliser=normaliser,
            weights=weights,
            cross_entropy=rows.cross_entropy,
            divergence=rows.divergence,
            clipped=rows.clipped,
            draft_columns=rows.top1_columns,
            agreed=known & (rows.top1_columns == labels),
            label_mask=label_mask,
        )

    def _row_objective(self, normaliser: Tensor) -> RowObjective:
        return RowObjective(
            self.alpha,
            self.divergence,
            self.clip.max_nats if isinstance(self.clip, TermClip) else None,
            self.clip.max_share * normaliser if isinstance(self.clip, PositionClip) else None,
            self.chunk_elements,
        )


def _spread(rows: RowLosses, active: Tensor, label_mask: Tensor) -> RowLosses:
    """Lay the active rows out as [B, K], 0 (columns: -1) elsewhere."""

    def spread(values: Tensor, fill: int) -> Tensor:
        everywhere = torch.full((label_mask.numel(),), fill, dtype=values.dtype, device=values.device)
        return everywhere.index_copy(0, active, values).view_as(label_mask)

    return RowLosses(
        spread(rows.loss, 0),
        spread(rows.cross_entropy, 0),
        None if rows.divergence is None else spread(rows.divergence, 0),
        spread(rows.clipped, 0),
        spread(rows.top1_columns, -1),
    )


class LengthLoss(NamedTuple):
    """Loss of the length head over complete blocks; only `loss` carries a gradient.

    Attributes:
        loss: [] fp32, mean squared error; 0 without complete blocks.
        num_blocks: [] int64 complete blocks.
        mean_label: [] fp32 over them.
        mean_prediction: [] fp32 over them.
    """

    loss: Tensor
    num_blocks: Tensor
    mean_label: Tensor
    mean_prediction: Tensor


def accepted_lens(draft_token_ids: Tensor, token_ids: Tensor, label_mask: Tensor) -> Tensor:
    """Return how many leading drafts equal the trajectory's tokens, [B] int64, sum_m prod_{j <= m} [match_j].

    Args:
        draft_token_ids: [B, K] greedy drafts, target ids.
        token_ids: [B, K] int64 tokens of the trajectory.
        label_mask: [B, K] bool; a masked position matches nothing.
    """
    return ((draft_token_ids == token_ids) & label_mask).int().cumprod(dim=1).sum(dim=1)


def length_head_loss(
    head: LengthHead, hidden: Tensor, draft_token_ids: Tensor, token_ids: Tensor, label_mask: Tensor
) -> LengthLoss:
    """Return the mean squared error of the head against (accepted + 1) / W over complete blocks.

    A block that runs past the end of the response is left out, whatever it drafted: of such blocks only those with an
    early mismatch have a known length, and keeping just these (or taking the end for a mismatch, as published code
    does by comparing with padding) would teach the head to predict too little.

    Args:
        head: Gets the gradient.
        hidden: [B, W, H] the drafter's final hidden states; detached, so that the drafter does not learn from this.
        draft_token_ids: [B, K] greedy drafts, target ids.
        token_ids: [B, K] int64 tokens of the trajectory.
        label_mask: [B, K] bool.

    Source: AdaFlash (arXiv:2607.19223).
    """
    complete = label_mask.all(dim=1)  # [B]
    width = hidden.shape[1]
    label = (accepted_lens(draft_token_ids, token_ids, label_mask)[complete] + 1).float() / width
    prediction = head.predict(hidden.detach()[complete])
    num_blocks = complete.sum()
    at_least_one = num_blocks.clamp_min(1)
    return LengthLoss(
        loss=(prediction - label).square().sum() / at_least_one,
        num_blocks=num_blocks,
        mean_label=label.sum() / at_least_one,
        mean_prediction=prediction.detach().sum() / at_least_one,
    )
