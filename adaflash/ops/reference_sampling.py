# SPDX-License-Identifier: Apache-2.0
"""Reference bodies of `sample` and `verify_drafts`: filters, penalties, counter-based noise and acceptance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adaflash.ops.metadata import SamplingMetadata, VerifyMetadata, VerifyOutput


def sample(logits: Tensor, sampling: SamplingMetadata) -> Tensor:
    """See `Backend.sample`."""
    assert sampling.all_greedy, "only greedy rows so far"
    return logits.argmax(-1)


def verify_drafts(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None,
    meta: VerifyMetadata,
    sampling: SamplingMetadata,
    draft_column_token_ids: Tensor | None,
    sample_op: Callable[[Tensor, SamplingMetadata], Tensor],
) -> VerifyOutput:
    """See `Backend.verify_drafts`; `sample_op` is the backend's own `sample`."""
    assert draft_logits is None, "only coupled acceptance so far"
    tokens = sample_op(target_logits, sampling)
    num_seqs, width = len(meta.num_drafts_cpu), max(meta.num_drafts_cpu) + 1
    column = torch.arange(width, device=tokens.device)
    num_drafts = meta.cu_rows.diff() - 1
    inside = column <= num_drafts[:, None]
    rows = torch.full((num_seqs, width), -1, dtype=torch.int64, device=tokens.device)
    rows[inside] = tokens
    matches = (draft_token_ids[:, : width - 1] == rows[:, :-1]) & (column[:-1] < num_drafts[:, None])
    num_accepted = matches.long().cumprod(-1).sum(-1)
    return VerifyOutput(rows.masked_fill(column > num_accepted[:, None], -1), num_accepted)
