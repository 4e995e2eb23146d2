# SPDX-License-Identifier: Apache-2.0
"""Reference bodies of `sample` and `verify_drafts`, and log-probabilities of emitted tokens. Owns no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from adaflash.ops.filters import adjusted_logits, filtered_scores, select_rows
from adaflash.ops.lazy_noise import lazy_argmax
from adaflash.ops.metadata import SamplingMetadata, VerifyMetadata, VerifyOutput
from adaflash.ops.noise import ACCEPT_STREAM, RESIDUAL_STREAM, TOKEN_STREAM, NoiseRows, gumbel, uniform

SampleOp = Callable[[Tensor, SamplingMetadata], Tensor]
FilterOp = Callable[[Tensor, SamplingMetadata], Tensor]


class RowLogprobs(NamedTuple):
    """Log-probabilities under raw logits.

    Attributes:
        logprobs: [R] fp32 of the chosen tokens.
        ranks: [R] int64, 1 for the most likely token.
        top_token_ids: [R, num_top] int64, most likely first, lower id first on ties.
        top_logprobs: [R, num_top] fp32.
    """

    logprobs: Tensor
    ranks: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


# ---- sample ----------------------------------------------------------------------------------------------------


def sample(logits: Tensor, sampling: SamplingMetadata, filter_op: FilterOp = filtered_scores) -> Tensor:
    """Return argmax(filtered(logits / temperature) + Gumbel noise) per row, [R, V] -> [R]; see `Backend.sample`.

    `filter_op` does what `filtered_scores` does for rows that are all sampled.

    A greedy row is the argmax of its penalised and biased logits, lowest index on ties. A row whose largest logit is
    not finite yields the first NaN, else the first +inf, else (all -inf) column 0: no error, see `largest_logits`. A
    row's result does not depend on the other rows.
    """
    logits = logits.detach()  # noise and numpy take no gradient
    if sampling.all_greedy and sampling.penalties is None and sampling.bias is None:
        return _argmax(logits)
    parts: list[Tensor] = []
    for rows in _row_chunks(logits.shape[0], logits):
        part = select_rows(sampling, rows)
        adjusted = adjusted_logits(logits[int(rows[0]) : int(rows[-1]) + 1], part)
        parts.append(_argmax(adjusted) if part.all_greedy else _draw(adjusted, part, filter_op))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=logits.device)


def largest_logits(logits: Tensor) -> Tensor:
    """Return the largest of each row, [R, V] -> [R] fp32, NaN where there is one; not finite means a corrupted row.

    That is a row with a NaN, a +inf, or nothing but -inf.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:  # numpy takes half the time
        return torch.from_numpy(logits.numpy().max(-1))
    return logits.amax(-1).float()


def _row_chunks(num_rows: int, logits: Tensor) -> Iterator[Tensor]:
    """Yield 0 .. num_rows - 1 in pieces small enough for a CPU's cache, or for a fair share of a device's memory."""
    budget = 2**19 if logits.device.type == "cpu" else 2**23
    size = max(1, budget // max(logits.shape[1], 1))
    for start in range(0, num_rows, size):
        yield torch.arange(start, min(start + size, num_rows), device=logits.device)


def _argmax(logits: Tensor) -> Tensor:
    """Return the first of each row's largest, [n, V] -> [n]; numpy is eight times faster than torch on a CPU."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.shape[0]:
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _draw(adjusted: Tensor, sampling: SamplingMetadata, filter_op: FilterOp) -> Tensor:
    """Return the tokens of rows of which some are sampled, [n, V] -> [n]."""
    is_sampled = sampling.temperature > 0
    if bool(is_sampled.all()):
        scores = filter_op(adjusted, sampling)
        return _noisy_argmax(scores, _noise_rows(sampling), TOKEN_STREAM, sampling.column_token_ids)
    tokens = _argmax(adjusted)
    sampled = is_sampled.nonzero()[:, 0]
    if sampled.shape[0]:
        tokens[sampled] = _draw(adjusted[sampled], select_rows(sampling, sampled), filter_op)
    return tokens


def _noisy_argmax(scores: Tensor, rows: NoiseRows, stream: int, token_ids: Tensor | None) -> Tensor:
    """Return argmax(scores + Gumbel noise) per row, [n, V] -> [n]."""
    if scores.device.type == "cpu":
        return lazy_argmax(scores, rows, stream, token_ids)
    return (scores + gumbel(rows, stream, scores.shape[1], token_ids)).argmax(-1)


def _noise_rows(sampling: SamplingMetadata) -> NoiseRows:
    return NoiseRows(sampling.seed, sampling.sample_index, sampling.output_index)


# ---- verify ----------------------------------------------------------------------------------------------------


def verify_drafts(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None,
    meta: VerifyMetadata,
    sampling: SamplingMetadata,
    draft_column_token_ids: Tensor | None,
    sample_op: SampleOp,
) -> VerifyOutput:
    """See `Backend.verify_drafts`; `sample_op` is the backend's own `sample`.

    Coupling `gumbel` (no `draft_logits`): the token of a row is a function of the target's logits and of the noise
    (seed, sample, output index); drafts and verify lengths only decide how many rows are emitted at once.

    Coupling `rejection`: the emitted tokens follow the target's law; see `_decide_rejection`.
    """
    target_logits = target_logits.detach()
    if draft_logits is not None and not sampling.all_greedy:
        draft_logits = draft_logits.detach()

        def decide(wave: _Wave) -> Tensor:
            return _decide_rejection(wave, target_logits, draft_logits, sampling, draft_column_token_ids, sample_op)

    elif target_logits.device.type == "cpu" and not sampling.all_greedy:  # noise costs more than another wave

        def decide(wave: _Wave) -> Tensor:
            return sample_op(target_logits[wave.rows], select_rows(sampling, wave.rows))

    else:  # one call and no synchronisation, at the price of rows behind a rejection
        return _accept_matches(sample_op(target_logits, sampling), draft_token_ids, meta)
    return _verify_in_waves(draft_token_ids, meta, decide)


def _accept_matches(tokens: Tensor, draft_token_ids: Tensor, meta: VerifyMetadata) -> VerifyOutput:
    """Accept the leading drafts that equal the tokens [R] decided for their rows."""
    width = max(meta.num_drafts_cpu, default=0) + 1
    if width == 1:
        return VerifyOutput(tokens[:, None], torch.zeros_like(tokens))
    num_drafts = meta.cu_rows.diff()[:, None] - 1  # [S, 1]
    column = torch.arange(width, device=tokens.device)
    rows = (meta.cu_rows[:-1, None] + column).clamp_(max=tokens.shape[0] - 1)
    decided = tokens[rows]  # [S, width], meaningless behind a sequence's bonus row
    matches = (draft_token_ids[:, : width - 1] == decided[:, :-1]) & (column[:-1] < num_drafts)
    num_accepted = matches.long().cumprod(-1).sum(-1)
    return VerifyOutput(decided.masked_fill(column > num_accepted[:, None], -1), num_accepted)


class _Wave(NamedTuple):
    """Row k of every sequence whose first k drafts are accepted.

    Attributes:
        rows: [n] int64 rows of the target's logits.
        seqs: [n] int64 sequences.
        position: k.
        draft_token_ids: [n] int64, -1 where the sequence has no draft at k, that is for its bonus row.
    """

    rows: Tensor
    seqs: Tensor
    position: int
    draft_token_ids: Tensor


def _verify_in_waves(draft_token_ids: Tensor, meta: VerifyMetadata, decide: Callable[[_Wave], Tensor]) -> VerifyOutput:
    """Decide position after position, never behind a rejection; a draft is accepted when it is what was decided."""
    num_drafts = meta.cu_rows.diff() - 1  # [S]
    width = max(meta.num_drafts_cpu, default=0) + 1
    alive = torch.arange(num_drafts.shape[0], device=num_drafts.device)
    tokens = torch.full((alive.shape[0], width), -1, dtype=torch.int64, device=num_drafts.device)
    num_accepted = torch.zeros_like(alive)
    for k in range(width):
        if not alive.shape[0]:
            break
        drafts = torch.full_like(alive, -1)
        if k < width - 1:
            drafts = torch.where(num_drafts[alive] > k, draft_token_ids[alive, k], drafts)
        decided = decide(_Wave(meta.cu_rows[alive] + k, alive, k, drafts))
        tokens[alive, k] = decided
        alive = alive[decided == drafts]
        num_accepted[alive] += 1
    return VerifyOutput(tokens, num_accepted)


def _decide_rejection(
    wave: _Wave,
    target_logits: Tensor,
    draft_logits: Tensor,
    sampling: SamplingMetadata,
    draft_column_token_ids: Tensor | None,
    sample_op: SampleOp,
) -> Tensor:
    """Return the tokens of a wave: greedy and bonus rows are sampled, sampled drafts accepted or replaced.

    Let y_i be the emitted token at output index i, g_i, u_i, h_i the noise of streams 0, 1, 2 at i, and F_i what the
    noise at indexes < i determines. Claim: P(y_i = v | F_i) = p_i(v), p_i given y_<i, although a draft at i may have
    been drawn from the same g_i in several rounds. By induction y_<i, the last round start a <= i, and whether i is
    verified in that round are F_i-measurable: the round drafts x_k from q_k and g_k; q_k depends on y_<a and at most
    on x_a .. x_(k-1), and so does the decision to verify k. Index i is decided once, in the one round that accepts
    all of a .. i-1, by (g_i, u_i, h_i), which is independent of F_i: verified, x_i ~ q_i is accepted if u_i q_i(x_i)
    < p_i(x_i), else h_i draws from max(p_i - q_i, 0); not verified, g_i draws from p_i; both have law p_i. Drafts at
    i in earlier rounds reveal g_i to nobody: they were behind a rejection or not verified, hence not read by anything
    F_i contains. The proof fails, and the output is biased, once something decided before y_i reads a draft at k >=
    i: verify position k by the draft's own probability, or learn from drafts behind a rejection.
    Requests with equal seeds share noise: each has the right law as long as it does not steer the other's lengths.
    Drafts must have been drawn by `sample` from `draft_logits` (-inf on ids the drafter may not propose) under the
    same temperature, filters, bias and committed counts as the rows here, without draft prefix.
    """
    tokens = wave.draft_token_ids.clone()
    drafted = (wave.draft_token_ids >= 0) & (sampling.temperature[wave.rows] > 0)
    plain = wave.rows[~drafted]
    if plain.shape[0]:
        tokens[~drafted] = sample_op(target_logits[plain], select_rows(sampling, plain))
    places = drafted.nonzero()[:, 0]
    for chunk in _row_chunks(places.shape[0], target_logits):
        chosen = places[chunk]
        rows, drafts = wave.rows[chosen], wave.draft_token_ids[chosen]
        part = select_rows(sampling, rows)
        p = filtered_scores(adjusted_logits(target_logits[rows], part), part).softmax(-1)  # [n, V]
        q = _draft_probs(draft_logits[wave.seqs[chosen], wave.position], part, draft_column_token_ids, p.shape[1])
        tokens[chosen] = _accept_or_replace(p, q, drafts, _noise_rows(part))
    return tokens


def _draft_probs(
    logits: Tensor, sampling: SamplingMetadata, column_token_ids: Tensor | None, vocab_size: int
) -> Tensor:
    """Return q over target ids, [n, Vd] -> [n, vocab_size], as `sample` saw it: without draft prefix."""
    penalties = sampling.penalties
    if penalties is not None:
        penalties = replace(penalties, draft_prefix=torch.full_like(penalties.draft_prefix, -1))
    sampling = replace(sampling, penalties=penalties, column_token_ids=column_token_ids)
    q = filtered_scores(adjusted_logits(logits, sampling), sampling).softmax(-1)
    if column_token_ids is None:
        return q
    return q.new_zeros(q.shape[0], vocab_size).index_copy(1, column_token_ids, q)


def _accept_or_replace(p: Tensor, q: Tensor, draft_token_ids: Tensor, rows: NoiseRows) -> Tensor:
    """Accept each draft with probability min(1, p / q), or draw from max(p - q, 0), [n, V] twice -> [n]."""
    p_draft, q_draft = (probs.gather(-1, draft_token_ids[:, None])[:, 0] for probs in (p, q))
    accepted = uniform(rows, ACCEPT_STREAM) * q_draft < p_draft
    rejected = (~accepted).nonzero()[:, 0]
    if not rejected.shape[0]:
        return draft_token_ids
    residual = (p[rejected] - q[rejected]).clamp_(min=0)
    # p = q up to rounding leaves no residual: then p is the law to draw from
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p[rejected])
    keys = NoiseRows(*(key[rejected] for key in rows))
    return draft_token_ids.index_copy(0, rejected, _noisy_argmax(residual.log(), keys, RESIDUAL_STREAM, None))


# ---- log-probabilities -----------------------------------------------------------------------------------------


def row_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> RowLogprobs:
    """Return log-probabilities under raw logits, in fp32.

    Args:
        logits: [R, V], before penalties, bias and temperature.
        token_ids: [R] int64 chosen token of each row.
        num_top: How many of the most likely tokens to report, at most V.
    """
    wide = logits.float()
    normaliser = wide.logsumexp(-1, keepdim=True)
    chosen = wide.gather(-1, token_ids[:, None])
    values, ids = wide.topk(num_top, sorted=False)
    ids, order = ids.sort()
    values, by_value = values.gather(-1, order).sort(descending=True, stable=True)
    return RowLogprobs(
        (chosen - normaliser)[:, 0],
        (wide > chosen).sum(-1) + 1,
        ids.gather(-1, by_value),
        values - normaliser,
    )
