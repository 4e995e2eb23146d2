# SPDX-License-Identifier: Apache-2.0
"""What a drafter would have had accepted on recorded greedy trajectories, without running the target again.

Greedy output does not depend on the drafter, so the rounds of any drafter can be replayed exactly: a round anchored at
a drafts K tokens, those of the leading ones that equal the trajectory are accepted, and the next round is anchored at
a + accepted + 1, the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from adaflash.errors import ConfigError
from adaflash.speculative.budget import DraftSignals, VerifyPolicy
from adaflash.speculative.dflash import DFlashDrafter, max_probability
from adaflash.training.blocks import TrainingSequence, make_blocks
from adaflash.training.drafter_forward import draft_hidden
from adaflash.training.losses import accepted_lens
from adaflash.training.row_losses import CHUNK_ELEMENTS

# A call projects the context of its sequence once, so few anchors would repeat that, and many take memory.
ANCHORS_PER_CALL = 256


@dataclass(frozen=True)
class ReplayResult:
    """The decode rounds of one sequence, or of several, that make k drafts; counts as `SpeculationStats` has them.

    Attributes:
        num_rounds: Decode rounds, one target forward each.
        num_emitted_tokens: Tokens they emitted, bonus tokens included; the first one of a response is none of them.
        num_verified_per_position: [k] rounds that verified a draft at this position.
        num_accepted_per_position: [k] rounds that accepted it.
        draft_token_ids: [A, k] int64 greedy drafts at every position of the response but its last, whether a round was
            anchored there or not; -1 where a block would reach past the drafter's positions.
    """

    num_rounds: int
    num_emitted_tokens: int
    num_verified_per_position: tuple[int, ...]
    num_accepted_per_position: tuple[int, ...]
    draft_token_ids: Tensor

    @property
    def num_verified_tokens(self) -> int:
        """Drafts verified."""
        return sum(self.num_verified_per_position)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted."""
        return sum(self.num_accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, the bonus token included (>= 1 once a round ran, else 0)."""
        return self.num_emitted_tokens / self.num_rounds if self.num_rounds else 0.0

    @staticmethod
    def total(results: Sequence[ReplayResult]) -> ReplayResult:
        """Add up the counts of at least one result and join the drafts, in order."""
        return ReplayResult(
            sum(result.num_rounds for result in results),
            sum(result.num_emitted_tokens for result in results),
            tuple(map(sum, zip(*(result.num_verified_per_position for result in results), strict=True))),
            tuple(map(sum, zip(*(result.num_accepted_per_position for result in results), strict=True))),
            torch.cat([result.draft_token_ids for result in results]),
        )


class AnchorDrafts(NamedTuple):
    """Greedy drafts of A anchors, all k of each, whether they would be verified or not.

    Attributes:
        token_ids: [A, k] target ids; -1 where a block would reach past the drafter's positions.
        confidence: [A, k] fp32 largest probability of each draft distribution; 0 there.
        num_matched: [A] leading drafts that are the trajectory's; 0 there.
        length_ratio: [A] fp32 prediction of the length head, 0 there; None without one, and when k < K.
    """

    token_ids: Tensor
    confidence: Tensor
    num_matched: Tensor
    length_ratio: Tensor | None


class _Round(NamedTuple):
    """One decode round."""

    num_verified: int
    num_accepted: int
    num_emitted: int


def replay(
    drafter: DFlashDrafter,
    sequence: TrainingSequence,
    taps: Tensor,
    max_verified: int | None = None,
    threshold: float | None = None,
    max_output_tokens: int | None = None,
    context_drafter: DFlashDrafter | None = None,
) -> ReplayResult:
    """Replay the rounds of a greedy trajectory, as a server with room for every draft would run them.

    Exact up to rounding: a draft that is a near tie may come out otherwise here, where blocks are computed together.

    Args:
        drafter: Not packed; `rebuild_fused` is not needed.
        sequence: Its response is one run of tokens that ends it.
        taps: [S - 1, len(tap_layer_ids) * H] target features, in the drafter's dtype and on its device.
        max_verified: Most drafts a round makes and verifies; None is K. `EngineConfig.num_speculative_tokens`.
        threshold: Verify only leading drafts whose cumulative confidence is at least this, the policy `confidence`;
            None is the policy `fixed`.
        max_output_tokens: The request's limit on output tokens, beyond which nothing is drafted. None takes the end of
            the response for that of a block, its last token included: emitted tokens and rounds are the same, but a
            response cut by its limit may count its last token as an accepted draft instead of a bonus token.
        context_drafter: See `draft_hidden`.

    Raises:
        ConfigError: An argument is out of its range.
    """
    num_drafts = drafter.draft_block_size - 1
    if max_verified is not None and not 1 <= max_verified <= num_drafts:
        raise ConfigError(f"max_verified={max_verified} is invalid: must be in [1, {num_drafts}]")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ConfigError(f"threshold={threshold} is invalid: must be in [0, 1]")
    first = _response_start(sequence, max_output_tokens)
    anchors = torch.arange(first, max(first, len(sequence.token_ids) - 1))  # [A]
    limit = num_drafts if max_verified is None else max_verified
    drafts = draft_at(drafter, sequence, taps, anchors, context_drafter, limit)
    # Tokens behind the first that drafts may become; under a limit the last one is always a bonus token.
    draftable = len(anchors) if max_output_tokens is None else max_output_tokens - 2
    last_anchor = drafter.max_position_embeddings - drafter.draft_block_size
    caps = [min(limit, draftable - i) if first + i <= last_anchor else 0 for i in range(len(anchors))]
    policy = VerifyPolicy("fixed" if threshold is None else "confidence", num_drafts + 1, threshold or 0.0)
    num_verified = policy.choose(DraftSignals(drafts.confidence.tolist(), None), caps)
    return _count(_walk(num_verified, drafts.num_matched.tolist()), drafts.token_ids.cpu())


def _response_start(sequence: TrainingSequence, max_output_tokens: int | None) -> int:
    """Return the position of the first response token, S without one."""
    num_tokens, num_output_tokens = len(sequence.token_ids), int(sequence.response_mask.sum())
    first = num_tokens - num_output_tokens
    assert bool(sequence.response_mask[first:].all()), "the response is one run that ends the sequence"
    if max_output_tokens is not None and max_output_tokens < num_output_tokens:
        raise ConfigError(
            f"max_output_tokens={max_output_tokens} is invalid: must be >= {num_output_tokens}, "
            "the tokens of the response"
        )
    return first


@torch.no_grad()
def draft_at(
    drafter: DFlashDrafter,
    sequence: TrainingSequence,
    taps: Tensor,
    anchors: Tensor,
    context_drafter: DFlashDrafter | None = None,
    num_drafts: int | None = None,
) -> AnchorDrafts:
    """Draft at all anchors; those too close to the drafter's last position draft nothing.

    Args:
        drafter: As in `replay`.
        sequence: As in `replay`.
        taps: As in `replay`.
        anchors: [A] int64 increasing positions in the response but for its last.
        context_drafter: See `draft_hidden`.
        num_drafts: k, of each block; None is K, which alone shows length ratios.
    """
    whole, device = drafter.draft_block_size - 1, drafter.backend.device
    num_drafts = whole if num_drafts is None else num_drafts
    length_head = drafter.length_head if num_drafts == whole else None
    token_ids = torch.full((len(anchors), num_drafts), -1, device=device)
    confidence = torch.zeros(len(anchors), num_drafts, device=device)
    num_matched = torch.zeros(len(anchors), dtype=torch.int64, device=device)
    length_ratio = None if length_head is None else torch.zeros(len(anchors), device=device)
    drafting = anchors[anchors + drafter.draft_block_size <= drafter.max_position_embeddings]
    for begin in range(0, len(drafting), ANCHORS_PER_CALL):
        part = slice(begin, min(begin + ANCHORS_PER_CALL, len(drafting)))
        blocks = make_blocks([sequence], [drafting[part]], num_drafts + 1, drafter.mask_token_id).to(device)
        hidden = draft_hidden(drafter, taps, blocks, context_drafter=context_drafter)
        token_ids[part], confidence[part] = _greedy(drafter, hidden[:, 1:])
        if length_head is not None and length_ratio is not None:
            length_ratio[part] = length_head.predict(hidden)
        num_matched[part] = accepted_lens(token_ids[part], blocks.label_token_ids, blocks.label_mask)
    return AnchorDrafts(token_ids, confidence, num_matched, length_ratio)


def _greedy(drafter: DFlashDrafter, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable tokens (target ids) and their probabilities, [A, k, H] -> 2 x [A, k]."""
    column_token_ids = drafter.column_token_ids
    num_columns = drafter.config.vocab_size if column_token_ids is None else len(column_token_ids)
    rows, step = hidden.flatten(0, 1), max(1, CHUNK_ELEMENTS // num_columns)
    columns, confidence = [], []
    for begin in range(0, len(rows), step):
        logits = drafter.draft_logits(rows[begin : begin + step])
        columns.append(logits.argmax(-1))
        confidence.append(max_probability(logits))
    drafted = torch.cat(columns)
    token_ids = drafted if column_token_ids is None else column_token_ids[drafted]
    return token_ids.view(hidden.shape[:2]), torch.cat(confidence).view(hidden.shape[:2])


def _walk(num_verified: list[int], num_matched: list[int]) -> list[_Round]:
    """Go from round to round; entry i of the lists is the anchor i positions behind the first response token."""
    rounds = []
    anchor, last = 0, len(num_verified)
    while anchor < last:
        num_accepted = min(num_verified[anchor], num_matched[anchor])
        num_emitted = min(num_accepted + 1, last - anchor)
        rounds.append(_Round(num_verified[anchor], num_accepted, num_emitted))
        anchor += num_emitted
    return rounds


def _count(rounds: list[_Round], draft_token_ids: Tensor) -> ReplayResult:
    num_drafts = draft_token_ids.shape[1]
    return ReplayResult(
        len(rounds),
        sum(r.num_emitted for r in rounds),
        _per_position([r.num_verified for r in rounds], num_drafts),
        _per_position([r.num_accepted for r in rounds], num_drafts),
        draft_token_ids,
    )


def _per_position(lens: list[int], num_positions: int) -> tuple[int, ...]:
    """Return how many of the lengths reach each position, [num_positions]."""
    ending = [0] * (num_positions + 1)
    for length in lens:
        ending[length] += 1
    return tuple(list(accumulate(reversed(ending)))[-2::-1])
