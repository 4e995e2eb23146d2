# SPDX-License-Identifier: Apache-2.0
"""The threshold length head: one scalar per draft block, the share of it the target is expected to accept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adaflash.speculative.base import LengthHead


class ThresholdLengthHead(LengthHead, nn.Module):
    """Predict (accepted + 1) / W from the drafter's final hidden states; always computed in fp32.

    f = [mean over W of hidden ; hidden at W-1], h = silu(down f), h = h + silu(res h), ratio = sigmoid(out h).
    Parameter names are the checkpoint's, without the prefix `thresh_head_two_model.`.

    Args:
        hidden_size: H of the drafter.
        bottleneck_dim: Width of h.
    """

    def __init__(self, hidden_size: int, bottleneck_dim: int) -> None:
        super().__init__()
        self.down = nn.Linear(2 * hidden_size, bottleneck_dim, dtype=torch.float32)
        self.res = nn.Sequential(nn.Linear(bottleneck_dim, bottleneck_dim, dtype=torch.float32))
        self.out = nn.Linear(bottleneck_dim, 1, dtype=torch.float32)

    def predict(self, hidden: Tensor) -> Tensor:
        """See `LengthHead.predict`; differentiable in the head's parameters and in `hidden`."""
        wide = hidden.float()  # [S, W, H]
        features = torch.cat((wide.mean(dim=1), wide[:, -1]), dim=-1)  # [S, 2H]
        bottleneck = F.silu(self.down(features))
        bottleneck = bottleneck + F.silu(self.res(bottleneck))
        ratio: Tensor = torch.sigmoid(self.out(bottleneck))  # [S, 1], range (0, 1)
        return ratio.squeeze(-1)
