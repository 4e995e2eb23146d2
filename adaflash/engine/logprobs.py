# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the tokens a step emits, for the requests that asked for them."""

from __future__ import annotations

import torch
from torch import Tensor

from adaflash.ops.reference_sampling import row_logprobs
from adaflash.request import Logprob, TokenLogprobs


def step_logprobs(
    wanted: list[int | None], num_drafts: list[int], logits: Tensor, token_ids: list[list[int]]
) -> list[list[TokenLogprobs] | None]:
    """Return, for each sequence, the log-probabilities of its tokens, None where none were asked for.

    Args:
        wanted: Of each sequence, how many of the most likely tokens to name; None for no log-probabilities.
        num_drafts: Of each sequence; it has one row of logits more.
        logits: [R, V] raw, of all sequences.
        token_ids: Emitted tokens of each sequence, those of its first rows.
    """
    results: list[list[TokenLogprobs] | None] = [None] * len(wanted)
    if wanted.count(None) == len(wanted):
        return results
    row = 0
    for s, (num_top, drafts, tokens) in enumerate(zip(wanted, num_drafts, token_ids, strict=True)):
        if num_top is not None:
            results[s] = _token_logprobs(logits[row : row + len(tokens)], tokens, num_top)
        row += drafts + 1
    return results


def _token_logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Return log-probabilities of emitted tokens under raw logits [n, V]."""
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    out = row_logprobs(logits, ids, num_top)
    top_ids, top_logprobs = out.top_token_ids.tolist(), out.top_logprobs.tolist()
    return [
        TokenLogprobs(
            Logprob(token_id, logprob, rank),
            tuple(Logprob(t, lp, i + 1) for i, (t, lp) in enumerate(zip(ids_row, lps_row, strict=True))),
        )
        for token_id, logprob, rank, ids_row, lps_row in zip(
            token_ids, out.logprobs.tolist(), out.ranks.tolist(), top_ids, top_logprobs, strict=True
        )
    ]
