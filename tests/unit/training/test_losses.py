# SPDX-License-Identifier: Apache-2.0
"""The loss of blocks: weights, normalisers, clips, reports, and the length head's loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.errors import ConfigError
from adaflash.speculative.length_head import ThresholdLengthHead
from adaflash.training.losses import DraftLoss, LossOutput, PositionClip, TermClip, accepted_lens, length_head_loss
from adaflash.training.position_weights import CreditWeights, DecayWeights
from adaflash.training.row_losses import DraftHead

BLOCKS, LABELS, HIDDEN, VOCAB, MASK = 6, 5, 12, 41, 40
OSD = {"alpha": 0.0, "divergence": "forward_kl", "clip": None}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "cross_entropy": {"alpha": 1.0},
    "tight_terms": {"alpha": 0.5, "clip": TermClip(0.02)},
    "upstream_clip": {"clip": PositionClip(0.05)},
    "osd": OSD,
    "no_clip": {"alpha": 0.3, "clip": None},
    "clipped_forward": {"alpha": 0.3, "divergence": "forward_kl", "clip": TermClip(0.05)},
    "credit": {"weighting": CreditWeights(0.5)},
    "credit_upstream_clip": {"weighting": CreditWeights(0.0), "clip": PositionClip(0.2)},
    "uniform": {"weighting": DecayWeights(float("inf"))},
}


class Batch(NamedTuple):
    hidden: Tensor
    target_hidden: Tensor
    labels: Tensor
    label_mask: Tensor
    head: DraftHead


def make_batch(num_columns: int | None = None, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    """Blocks of 5, 4, .. 1 and 0 labels; the drafter is right now and then."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    ids = None if num_columns is None else torch.randperm(VOCAB, generator=generator)[:num_columns]
    head = DraftHead(weight.to(dtype), ids, MASK)
    target_hidden, noise = torch.randn(2, BLOCKS, LABELS, HIDDEN, generator=generator, dtype=torch.float64)
    hidden = (target_hidden + 0.7 * noise).to(dtype).requires_grad_()
    labels = head.columns((target_hidden @ weight.T).argmax(-1))
    lens = torch.arange(LABELS, LABELS - BLOCKS, -1)
    return Batch(hidden, target_hidden.to(dtype), labels, torch.arange(LABELS) < lens[:, None], head)


def plain_loss(batch: Batch, loss: DraftLoss) -> Tensor:
    """The definition, position by position, in fp64."""
    weight = batch.head.weight.double()
    columns = [c for c in range(len(weight)) if c != batch.head.mask_column]
    log_p = torch.full((*batch.labels.shape, len(weight)), -torch.inf, dtype=torch.float64)
    log_q = log_p.clone()
    log_p[..., columns] = (batch.hidden.double() @ weight[columns].T).log_softmax(-1)
    log_q[..., columns] = (batch.target_hidden.double() @ weight[columns].T).log_softmax(-1)
    weights, total = plain_weights(loss, log_p.detach(), batch)
    result = torch.zeros((), dtype=torch.float64)
    for b, k in batch.label_mask.nonzero().tolist():
        p, q, label = log_p[b, k][columns], log_q[b, k][columns], int(batch.labels[b, k])
        terms = p.exp() * (p - q) if loss.divergence == "reverse_kl" else q.exp() * (q - p)
        if isinstance(loss.clip, TermClip):
            terms = terms.clamp(max=loss.clip.max_nats)
        divergence = terms.sum() / total
        if isinstance(loss.clip, PositionClip):
            divergence = divergence.clamp(max=loss.clip.max_share)
        cross_entropy = -log_p[b, k, label] / total if label >= 0 else 0.0
        result = result + weights[b][k] * (loss.alpha * cross_entropy + (1 - loss.alpha) * divergence)
    return result


def plain_weights(loss: DraftLoss, log_p: Tensor, batch: Batch) -> tuple[list[list[float]], float]:
    """Weights [B][K] and what their sum is divided by."""
    lens = batch.label_mask.sum(1).tolist()
    if isinstance(loss.weighting, DecayWeights):
        decay = DecayWeights(loss.weighting.gamma).weights(torch.zeros(1, LABELS, dtype=torch.float64), *[_ones()] * 2)
        weights = [[w if k < n else 0.0 for k, w in enumerate(decay[0].tolist())] for n in lens]
        return weights, sum(map(sum, weights))
    weights = []
    for b, n in enumerate(lens):
        survivals, survival = [], 1.0
        for k in range(n):
            label = int(batch.labels[b, k])
            a = loss.weighting.smoothing + (1 - loss.weighting.smoothing) * log_p[b, k, label].exp().item()
            survival *= a if label >= 0 else 0.0
            survivals.append(survival)
        weights.append([sum(survivals[k:]) for k in range(LABELS)])
    return weights, sum(n > 0 for n in lens)


def _ones() -> Tensor:
    return torch.ones(1, LABELS, dtype=torch.bool)


@pytest.mark.parametrize("num_columns", [None, 20])
@pytest.mark.parametrize("name", SETTINGS)
def test_value_and_gradient_equal_the_definition_in_fp64(name: str, num_columns: int | None) -> None:
    loss = DraftLoss(**SETTINGS[name], chunk_elements=100)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        batch = make_batch(num_columns, dtype)
        got, expected = loss(*batch).loss, plain_loss(batch, loss)
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
        gradients = [torch.autograd.grad(value, batch.hidden)[0] for value in (got, expected)]
        torch.testing.assert_close(*gradients, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", SETTINGS)
def test_masked_positions_have_no_influence_and_no_gradient(name: str) -> None:
    loss = DraftLoss(**SETTINGS[name])
    batch = make_batch()
    expected = loss(*batch).loss
    noisy = batch.hidden.detach().clone()
    noisy[~batch.label_mask] = torch.nan
    noisy.requires_grad_()
    got = loss(noisy, batch.target_hidden, batch.labels.where(batch.label_mask, 3), batch.label_mask, batch.head)
    torch.testing.assert_close(got.loss, expected)
    assert not torch.autograd.grad(got.loss, noisy)[0][~batch.label_mask].any()


@pytest.mark.parametrize("name", [name for name in SETTINGS if "upstream" not in name])
def test_parts_of_a_batch_add_up(name: str) -> None:
    loss = DraftLoss(**SETTINGS[name])
    batch = make_batch()
    whole = loss(*batch)
    parts = [loss(*(t[part] for t in batch[:4]), batch.head) for part in (slice(0, 2), slice(2, None))]
    total = sum(part.loss * part.normaliser for part in parts) / sum(part.normaliser for part in parts)
    torch.testing.assert_close(total, whole.loss)


def test_a_batch_without_labels_has_no_loss_and_a_zero_gradient() -> None:
    batch = make_batch()
    for loss in (DraftLoss(), DraftLoss(weighting=CreditWeights()), DraftLoss(clip=PositionClip())):
        got = loss(*batch[:3], torch.zeros_like(batch.label_mask), batch.head)
        assert got.loss == 0
        assert got.normaliser == 0
        assert not torch.autograd.grad(got.loss, batch.hidden)[0].any()


def share_of_positions(out: LossOutput) -> float:
    """Share of the positions with a clipped term."""
    return (out.clipped > 0).sum().item() / out.label_mask.sum().item()


def test_the_term_clip_does_not_depend_on_the_batch_and_the_upstream_clip_does() -> None:
    batch = make_batch()
    double = Batch(*(torch.cat((t, t)) for t in batch[:4]), batch.head)

    def clipped(clip: TermClip | PositionClip, batch: Batch) -> float:
        return share_of_positions(DraftLoss(clip=clip)(*batch))

    assert clipped(TermClip(0.2), batch) == clipped(TermClip(0.2), double) > 0
    assert clipped(PositionClip(0.02), batch) > clipped(PositionClip(0.02), double)


def report(**settings: Any) -> tuple[Batch, LossOutput]:
    batch = make_batch(20)
    return batch, DraftLoss(**settings)(*batch)


def test_the_report_says_what_was_clipped() -> None:
    batch, tight = report(clip=TermClip(0.01))
    share = tight.clipped_terms().item()
    assert 0 < share < share_of_positions(tight) <= 1
    counts = tight.clipped * len(batch.head.weight)
    torch.testing.assert_close(counts, counts.round())
    assert not tight.clipped[~batch.label_mask].any()
    assert report(clip=None)[1].clipped_terms() == 0
    assert report(clip=TermClip(1e6))[1].clipped_terms() == 0


def test_the_report_says_what_would_be_drafted_and_what_agrees() -> None:
    batch, got = report()
    drafts = (batch.hidden @ batch.head.weight.T).argmax(-1)
    assert torch.equal(got.draft_columns, drafts.where(batch.label_mask, -1))
    agreed = (drafts == batch.labels) & batch.label_mask
    assert torch.equal(got.agreed, agreed)
    assert 0 < agreed.sum() < batch.label_mask.sum()
    torch.testing.assert_close(got.agreement(), agreed.sum(0) / torch.tensor([5, 4, 3, 2, 1]))


def test_osd_is_the_plain_forward_kl() -> None:
    batch = make_batch()
    logits = [h[batch.label_mask] @ batch.head.weight[:MASK].T for h in (batch.hidden, batch.target_hidden)]
    log_p, log_q = (part.log_softmax(-1) for part in logits)
    expected = F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")
    torch.testing.assert_close(DraftLoss(**OSD, weighting=DecayWeights(float("inf")))(*batch).loss, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.1}, "alpha=1.1"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"divergence": "kl"}, "divergence='kl'.*reverse_kl"),
        ({"chunk_elements": 0}, "chunk_elements=0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftLoss(**settings)


@pytest.mark.parametrize("clip", [TermClip, PositionClip])
@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_clip_limits_must_be_positive(clip: Any, limit: float) -> None:
    with pytest.raises(ConfigError, match="must be > 0"):
        clip(limit)


def test_accepted_length_is_the_leading_run_of_matches() -> None:
    tokens = torch.arange(4).repeat(5, 1)
    drafts = tokens.clone()
    drafts[1, 0] = drafts[2, 2] = drafts[3, 3] = 9
    mask = torch.ones(5, 4, dtype=torch.bool)
    mask[4, 2:] = False
    assert accepted_lens(drafts, tokens, mask).tolist() == [4, 0, 2, 3, 2]


def head_batch(mask: Tensor) -> tuple[ThresholdLengthHead, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = torch.arange(4).repeat(len(mask), 1)
    drafts = tokens.clone()
    drafts[0, 1] = drafts[1, 3] = 9
    return ThresholdLengthHead(HIDDEN, 8), torch.randn(len(mask), 5, HIDDEN, requires_grad=True), drafts, tokens


def test_the_length_label_is_accepted_plus_one_over_the_block_size() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    head, hidden, drafts, tokens = head_batch(mask)
    got = length_head_loss(head, hidden, drafts, tokens, mask)
    labels = torch.tensor([2 / 5, 4 / 5, 1.0])
    torch.testing.assert_close(got.loss, F.mse_loss(head.predict(hidden), labels))
    torch.testing.assert_close(got.mean_label, labels.mean())
    torch.testing.assert_close(got.mean_prediction, head.predict(hidden).mean().detach())


def test_the_length_head_learns_and_the_drafter_does_not() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    head, hidden, drafts, tokens = head_batch(mask)
    length_head_loss(head, hidden, drafts, tokens, mask).loss.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is None
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())


def test_blocks_past_the_end_of_the_response_do_not_shorten_the_label() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[0, 3:] = mask[3, 1:] = False  # block 0 mismatches before its end, block 3 does not
    head, hidden, drafts, tokens = head_batch(mask)
    got = length_head_loss(head, hidden, drafts, tokens, mask)
    expected = length_head_loss(head, hidden[1:3], drafts[1:3], tokens[1:3], mask[1:3])
    assert got.num_blocks == 2
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.mean_label, torch.tensor((4 / 5 + 1.0) / 2))


def test_no_complete_block_is_no_error() -> None:
    mask = torch.zeros(3, 4, dtype=torch.bool)
    head, hidden, drafts, tokens = head_batch(mask)
    got = length_head_loss(head, hidden, drafts, tokens, mask)
    assert got.loss == 0
    got.loss.backward()  # type: ignore[no-untyped-call]
