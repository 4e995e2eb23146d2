# SPDX-License-Identifier: Apache-2.0
"""Position weights, and that the credit survives normalisation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from adaflash.errors import ConfigError
from adaflash.training.position_weights import CreditWeights, DecayWeights, PositionWeights

MASK = torch.tensor([[True, True, True, True], [True, True, False, False]])


def expected_length(acceptance: Tensor, mask: Tensor) -> Tensor:
    """Expected accepted drafts of each block, position by position."""
    rows = []
    for row, supervised in zip(acceptance, mask, strict=True):
        survival, total = torch.ones((), dtype=row.dtype), torch.zeros((), dtype=row.dtype)
        for a, here in zip(row, supervised, strict=True):
            survival = survival * a
            total = total + survival if here else total
        rows.append(total)
    return torch.stack(rows)


def loss_gradient(weighting: PositionWeights, logits: Tensor, mask: Tensor) -> Tensor:
    """Gradient of the normalised weighted cross-entropy, -log sigmoid(logits)."""
    logits = logits.clone().requires_grad_()
    acceptance = logits.sigmoid()
    weights = weighting.weights(acceptance, mask, mask)
    loss = (weights * -acceptance.log()).sum() / weighting.normaliser(mask, logits.dtype)
    return torch.autograd.grad(loss, logits)[0]


def test_decay_falls_by_e_over_gamma_positions_and_is_normalised_by_its_sum() -> None:
    weights = DecayWeights(2.0).weights(torch.zeros(2, 4), MASK, MASK)
    expected = [math.exp(-k / 2) for k in range(4)]
    torch.testing.assert_close(weights, torch.tensor([expected, [*expected[:2], 0.0, 0.0]]))
    torch.testing.assert_close(DecayWeights(2.0).normaliser(MASK, torch.float32), weights.sum())


def test_an_infinite_gamma_weighs_all_positions_alike() -> None:
    assert torch.equal(DecayWeights(math.inf).weights(torch.zeros(2, 4), MASK, MASK), MASK.float())


def test_the_unsmoothed_credit_gradient_is_that_of_the_expected_accepted_length() -> None:
    logits = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(-expected_length(wanted.sigmoid(), MASK).mean(), wanted)
    torch.testing.assert_close(loss_gradient(CreditWeights(0.0), logits, MASK), expected)


def test_the_credit_is_not_cancelled_by_the_normalisation() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    sure, unsure = torch.full((1, 4), 0.0), torch.tensor([[-4.0, 0.0, 0.0, 0.0]])

    def pull(weighting: PositionWeights, logits: Tensor) -> float:
        """Gradient at the last position, whose own acceptance is the same in both blocks."""
        return loss_gradient(weighting, logits, mask)[0, 3].item()

    # A first draft that is accepted 28 times less often leaves 28 times less to gain behind it.
    ratio = (sure[0, 0].sigmoid() / unsure[0, 0].sigmoid()).item()
    assert pull(CreditWeights(0.0), sure) / pull(CreditWeights(0.0), unsure) == pytest.approx(ratio)
    assert pull(DecayWeights(), sure) == pytest.approx(pull(DecayWeights(), unsure))
    # What dividing by the sum of the weights would do: the whole block scales up again, and half the ratio is lost.
    weights = [CreditWeights(0.0).weights(logits.sigmoid(), mask, mask) for logits in (sure, unsure)]
    cancelled = [float(w[0, 3] / w.sum()) for w in weights]
    assert cancelled[0] / cancelled[1] < ratio / 2


def test_smoothing_gives_positions_behind_a_rejected_one_a_weight() -> None:
    acceptance = torch.tensor([[1e-6, 0.5, 0.5, 0.5]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert CreditWeights(0.0).weights(acceptance, mask, mask)[0, 3] < 1e-6
    smoothed = [0.5, 0.5 * 0.75, 0.5 * 0.75**2, 0.5 * 0.75**3]  # prefix products
    expected = [sum(smoothed[k:]) for k in range(4)]
    torch.testing.assert_close(CreditWeights(0.5).weights(acceptance, mask, mask), torch.tensor([expected]))
    assert CreditWeights(1.0).weights(acceptance, mask, mask).tolist() == [[4.0, 3.0, 2.0, 1.0]]


def test_masked_positions_and_what_follows_an_undraftable_label_have_no_credit() -> None:
    draftable = torch.tensor([[True, False, True, True], [True, True, False, False]])
    weights = CreditWeights(0.5).weights(torch.full((2, 4), 0.5), draftable, MASK)
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0, 0, 0], [0.75 + 0.75**2, 0.75**2, 0, 0]]))


def test_credit_is_normalised_by_the_number_of_blocks_with_labels() -> None:
    mask = torch.cat((MASK, torch.zeros(3, 4, dtype=torch.bool)))
    assert CreditWeights().normaliser(mask, torch.float32) == 2


def test_weights_carry_no_gradient() -> None:
    acceptance = torch.full((2, 4), 0.5, requires_grad=True)
    assert not CreditWeights().weights(acceptance, MASK, MASK).requires_grad


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.nan])
def test_gamma_must_be_positive(gamma: float) -> None:
    with pytest.raises(ConfigError, match="gamma"):
        DecayWeights(gamma)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, math.nan])
def test_smoothing_must_be_a_share(smoothing: float) -> None:
    with pytest.raises(ConfigError, match="smoothing"):
        CreditWeights(smoothing)
