# SPDX-License-Identifier: Apache-2.0
"""Penalties, bias and the top-k, top-p, min-p filters on rows of logits, in plain PyTorch. Owns no state.

Order as in transformers and vLLM: repetition, frequency, presence penalty; bias; temperature; top-k; top-p; min-p, each
filter on what the one before kept. Every filter is a cut on the score itself, so tokens tied with the last one kept are
kept too, and the result depends neither on a sort's order nor on the vocabulary's.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from adaflash.ops.metadata import PenaltyMetadata, SamplingMetadata, SparseBias

_NUM_LEADING = 1024  # scores sorted first; a nucleus seldom has more tokens


def select_rows(sampling: SamplingMetadata, rows: Tensor) -> SamplingMetadata:
    """Return the metadata of distinct `rows` [n] int64, in their order."""
    penalties, bias = sampling.penalties, sampling.bias
    if penalties is not None:
        state = {"output_counts", "prompt_mask"}
        picked = {f.name: getattr(penalties, f.name)[rows] for f in fields(penalties) if f.name not in state}
        penalties = replace(penalties, **picked)
    if bias is not None:
        place = torch.full_like(sampling.seed, -1)  # [R] row of the selection
        place[rows] = torch.arange(rows.shape[0], device=rows.device)
        kept = place[bias.rows] >= 0
        bias = SparseBias(place[bias.rows[kept]], bias.token_ids[kept], bias.values[kept])
    return SamplingMetadata(
        sampling.all_greedy,
        sampling.temperature[rows],
        None if sampling.top_k is None else sampling.top_k[rows],
        None if sampling.top_p is None else sampling.top_p[rows],
        None if sampling.min_p is None else sampling.min_p[rows],
        sampling.seed[rows],
        sampling.sample_index[rows],
        sampling.output_index[rows],
        penalties,
        bias,
        sampling.column_token_ids,
    )


def adjusted_logits(logits: Tensor, sampling: SamplingMetadata) -> Tensor:
    """Return logits [n, V] in fp32 with penalties and bias applied; the argument itself when there are none."""
    adjusted = logits.float()
    if sampling.penalties is not None:
        adjusted = _penalise(adjusted, sampling.penalties, sampling.column_token_ids)
    if sampling.bias is not None:
        rows, columns, values = sampling.bias
        if sampling.column_token_ids is not None:
            columns, found = _find_columns(columns, sampling.column_token_ids)
            rows, columns, values = rows[found], columns[found], values[found]
        adjusted = adjusted.index_put((rows, columns), values, accumulate=True)
    return adjusted


def filtered_scores(adjusted: Tensor, sampling: SamplingMetadata) -> Tensor:
    """Return adjusted / temperature with -inf outside the filters, a new [n, V] tensor; greedy rows unchanged."""
    greedy = sampling.temperature == 0
    scores = adjusted / sampling.temperature.masked_fill(greedy, 1.0)[:, None]
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return scores
    top_k = None if sampling.top_k is None else sampling.top_k.masked_fill(greedy, 0)[:, None]
    top_p = None if sampling.top_p is None else sampling.top_p.masked_fill(greedy, 1.0)[:, None]
    cut = _rank_cut(scores, top_k, top_p)
    if sampling.min_p is not None:
        min_p = sampling.min_p.masked_fill(greedy, 0.0)[:, None]
        cut = torch.maximum(cut, scores.amax(-1, keepdim=True) + min_p.log())
    return scores.masked_fill_(scores < cut, float("-inf"))


def _rank_cut(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return the smallest score that top-k [n, 1] (0: all) and then top-p [n, 1] (1: all) keep, [n, 1]."""
    num_columns = scores.shape[1]
    cut = scores.new_full((scores.shape[0], 1), float("-inf"))
    if top_k is None and top_p is None:
        return cut
    count = 1
    if top_k is not None:
        limited = (top_k > 0) & (top_k < num_columns)
        ranks = torch.where(limited, top_k, 1).long()
        count = int(ranks.max()) + 1 if ranks.shape[0] else 1
    if top_p is not None:
        count = max(count, _NUM_LEADING)
    leading = _largest(scores, min(count, num_columns))  # [n, count], descending
    if top_k is not None:
        cut = torch.where(limited, leading.gather(-1, ranks - 1), cut)
    return cut if top_p is None else _nucleus_cut(scores, leading, cut, top_p)


def _nucleus_cut(scores: Tensor, leading: Tensor, cut: Tensor, top_p: Tensor) -> Tensor:
    """Raise the cut to the smallest score of the nucleus: the fewest tokens >= cut with a mass of at least top_p."""
    limited, top = top_p < 1, leading[:, :1]
    mass = (leading - top).exp_().masked_fill_(leading < cut, 0.0)  # probabilities over the largest one
    reached = mass.cumsum(-1)
    total = reached[:, -1:]
    partial = limited & (leading[:, -1:] >= cut) if leading.shape[1] < scores.shape[1] else torch.zeros_like(limited)
    if bool(partial.any()):
        kept_mass = (scores - top).exp_().masked_fill_(scores < cut, 0.0).sum(-1, keepdim=True)
        total = torch.where(partial, kept_mass, total)
    inside = (reached - mass < top_p * total) & (leading >= cut)
    nucleus = leading.gather(-1, inside.sum(-1, keepdim=True).clamp_(min=1) - 1)
    short = (partial & (reached[:, -1:] < top_p * total))[:, 0].nonzero()[:, 0]  # rows whose nucleus is wider
    if short.shape[0]:
        wide = scores[short]
        nucleus[short] = _nucleus_cut(wide, _largest(wide, scores.shape[1]), cut[short], top_p[short])
    return torch.where(limited, torch.maximum(nucleus, cut), cut)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Return each row's `count` largest scores in descending order, [n, V] -> [n, count]."""
    if scores.device.type != "cpu":
        return scores.topk(count).values
    # numpy selects and sorts ten times faster than torch on a CPU
    array = scores.numpy()
    top = np.partition(array, array.shape[1] - count)[:, array.shape[1] - count :]
    return torch.from_numpy(np.sort(top)[:, ::-1].copy())


def _penalise(logits: Tensor, penalties: PenaltyMetadata, column_token_ids: Tensor | None) -> Tensor:
    """Apply the penalties of rows with a slot, as in vLLM; frequency and presence count the output alone."""
    rows = (penalties.slot >= 0).nonzero()[:, 0]
    if not rows.shape[0]:
        return logits
    slot, prefix = penalties.slot[rows], penalties.draft_prefix[rows]
    counts = penalties.output_counts[slot]  # [m, V] copies
    counts.scatter_add_(1, prefix.clamp(min=0), (prefix >= 0).to(counts.dtype))
    in_prompt = penalties.prompt_mask[slot]
    if column_token_ids is not None:
        counts, in_prompt = counts[:, column_token_ids], in_prompt[:, column_token_ids]
    seen = (in_prompt | (counts > 0)).any(0).nonzero()[:, 0]  # [n] columns that some row penalises
    counts, in_prompt = counts[:, seen], in_prompt[:, seen]
    repetition = penalties.repetition[rows][:, None]
    x = logits[rows[:, None], seen]
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(in_prompt | (counts > 0), repeated, x)
    x = x - penalties.frequency[rows][:, None] * counts
    x = x - penalties.presence[rows][:, None] * (counts > 0)
    return logits.index_put((rows[:, None], seen), x)


def _find_columns(token_ids: Tensor, column_token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column of each token id, and whether there is one; columns need not be sorted."""
    ordered, order = column_token_ids.sort()
    place = torch.searchsorted(ordered, token_ids).clamp_(max=ordered.shape[0] - 1)
    return order[place], ordered[place] == token_ids
