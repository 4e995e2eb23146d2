# SPDX-License-Identifier: Apache-2.0
"""How much each position of a block counts: a fixed decay, or its credit in the expected accepted length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adaflash.errors import ConfigError


@dataclass(frozen=True)
class DecayWeights:
    """w_k = exp(-(k - 1) / gamma) for k = 1 .. K; the loss is the weighted mean, sum_k w_k l_k / sum_k w_k.

    Source: DFlash (arXiv:2602.06036).

    Attributes:
        gamma: Positions until the weight has fallen to 1/e; infinity weighs all alike.

    Raises:
        ConfigError: gamma is not positive.
    """

    gamma: float = 7.0

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ConfigError(f"gamma={self.gamma} is invalid: must be > 0")

    def weights(self, acceptance: Tensor, draftable: Tensor, label_mask: Tensor) -> Tensor:
        """Return the weights [B, K]; only `label_mask` matters. See `CreditWeights.weights`."""
        decay = [math.exp(-k / self.gamma) for k in range(label_mask.shape[1])]
        return label_mask * acceptance.new_tensor(decay)

    def normaliser(self, label_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what the weighted sum is divided by, []: the sum of the weights."""
        return self.weights(torch.ones_like(label_mask, dtype=dtype), label_mask, label_mask).sum()


@dataclass(frozen=True)
class CreditWeights:
    """w_k = sum_{m >= k} prod_{j <= m} a_j: the part of the expected accepted length that passes through position k.

    With a_j the probability that draft j is accepted given that those before it were, the expected accepted length of
    a block is E = sum_m prod_{j <= m} a_j, and w_k = dE / dlog a_k. So with a_j = p(label_j) the gradient of the
    weighted cross-entropy sum_k w_k (-log a_k), w held constant, is that of -E: a block's gradient is as large as what
    there is to gain in it. Sums run over supervised positions; a label that cannot be drafted has a_j = 0, so it and
    what follows in its block have no credit.

    A position whose predecessors are never accepted would have no weight and never learn, so
    a_j = smoothing + (1 - smoothing) p(label_j); at 0 the gradient is exactly that of -E.

    The sum over a batch is divided by the number of its blocks. Dividing by the sum of the weights, as for a decay,
    would cancel the credit: every batch would pull equally, however little it can gain.

    Source: D-PACE (arXiv:2605.18810), equations 7 to 9.

    Attributes:
        smoothing: In [0, 1]; at 1 the weights are K, K - 1, .. 1 whatever the drafter does.

    Raises:
        ConfigError: smoothing is outside [0, 1].
    """

    smoothing: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing <= 1:
            raise ConfigError(f"smoothing={self.smoothing} is invalid: must be in [0, 1]")

    def weights(self, acceptance: Tensor, draftable: Tensor, label_mask: Tensor) -> Tensor:
        """Return the weights.

        Args:
            acceptance: [B, K] fp32 p(label) under the current drafter.
            draftable: [B, K] bool, where there is a label that can be drafted.
            label_mask: [B, K] bool, where there is a label: a leading run.

        Returns:
            [B, K], without gradient; 0 where masked.
        """
        smoothed = self.smoothing + (1 - self.smoothing) * acceptance.detach()
        survival = torch.where(draftable, smoothed, 0.0).cumprod(dim=1)
        return survival.flip(1).cumsum(1).flip(1)

    def normaliser(self, label_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what the weighted sum is divided by, []: the number of blocks with a label."""
        return label_mask[:, 0].sum().to(dtype)


PositionWeights = DecayWeights | CreditWeights
