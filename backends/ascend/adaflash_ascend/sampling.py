# SPDX-License-Identifier: Apache-2.0
"""The filters of `sample`, with top-k done by npu_top_k_top_p where that changes no token.

The operator keeps what is tied with the k-th score, as the reference does. Its top-p does not: it cuts a sorted row at
a position, so ties fall to the order of the sort, and it sums probabilities in another order. So top-p stays the
reference's. With p = 1 the operator drops, beside what is not in the top k, only scores whose probability rounds to 0:
more than 87 below the largest, which Gumbel noise, spanning less than 26, never overcomes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from adaflash.ops.filters import filtered_scores
from adaflash.ops.metadata import SamplingMetadata
from adaflash_ascend.limits import MAX_TOP_K


def filtered(adjusted: Tensor, sampling: SamplingMetadata) -> Tensor:
    """Return adjusted / temperature with -inf outside the filters, [n, V] of rows that are all sampled."""
    top_k = sampling.top_k
    if top_k is None or sampling.top_p is not None or not _is_in_range(top_k, adjusted.shape[1]):
        return filtered_scores(adjusted, sampling)
    scores = adjusted / sampling.temperature[:, None]
    kept: Tensor = torch.ops.npu.npu_top_k_top_p(logits=scores, p=torch.ones_like(scores[:, 0]), k=top_k)
    if sampling.min_p is None:
        return kept
    unit = torch.ones_like(sampling.temperature)
    return filtered_scores(kept, replace(sampling, top_k=None, temperature=unit))


def _is_in_range(top_k: Tensor, num_columns: int) -> bool:
    """Return whether every row has a k that the operator takes; 0, for all tokens, is none."""
    low, high = torch.stack(top_k.aminmax()).tolist() if top_k.shape[0] else (0, 0)
    return bool(low >= 1 and high <= min(MAX_TOP_K, num_columns))
