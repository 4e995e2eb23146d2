# SPDX-License-Identifier: Apache-2.0
"""Losses of single rows against the target's distribution, through the LM head, without a [rows, vocabulary] tensor.

Letters: N rows, H hidden, V the target's vocabulary, Vd columns of the draft head (V, or the reduced vocabulary).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

Divergence = Literal["reverse_kl", "forward_kl"]

# fp32 logits of a chunk: 32 MB. A larger one is not faster on a CPU (`tools/bench/losses.py`).
CHUNK_ELEMENTS = 1 << 23


class DraftHead:
    """The target's LM head as the drafter uses it: frozen rows, and which target token each of them is.

    Args:
        weight: [V, H], the target's; the reduced rows are copied.
        column_token_ids: [Vd] int64 target id of each column; None when columns are target ids.
        mask_token_id: Never drafted, so its column has probability 0 in the draft and in the teacher.

    Attributes:
        weight: [Vd, H].
        mask_column: Column of the mask token, or None.
    """

    def __init__(self, weight: Tensor, column_token_ids: Tensor | None, mask_token_id: int) -> None:
        rows = weight.detach()
        columns = torch.full((len(rows),), -1, device=rows.device)  # [V]
        ids = torch.arange(len(rows), device=rows.device) if column_token_ids is None else column_token_ids
        columns[ids] = torch.arange(len(ids), device=rows.device)
        mask_column = int(columns[mask_token_id])
        columns[mask_token_id] = -1
        self.weight = rows if column_token_ids is None else rows[column_token_ids]
        self.mask_column = None if mask_column < 0 else mask_column
        self._columns = columns
        self._column_token_ids = column_token_ids

    def columns(self, token_ids: Tensor) -> Tensor:
        """Return the column of each target token, -1 for one that cannot be drafted, any shape."""
        return self._columns[token_ids]

    def token_ids(self, columns: Tensor) -> Tensor:
        """Return the target token of each column, any shape; -1 stays -1."""
        if self._column_token_ids is None:
            return columns
        return torch.where(columns < 0, columns, self._column_token_ids[columns.clamp_min(0)])


class RowObjective(NamedTuple):
    """alpha * CE + (1 - alpha) * D of one row; see `row_losses`.

    Attributes:
        alpha: Weight of the cross-entropy, in [0, 1]; at 1 the teacher's distribution is not needed.
        divergence: Direction of D.
        max_term_nats: Upper limit of each vocabulary term of D, or None.
        max_row_nats: Upper limit of D, [] fp32, or None.
        chunk_elements: Logits that may exist at once.
    """

    alpha: float
    divergence: Divergence = "reverse_kl"
    max_term_nats: float | None = None
    max_row_nats: Tensor | None = None
    chunk_elements: int = CHUNK_ELEMENTS


class RowLosses(NamedTuple):
    """Per-row results, each [N]; only `loss` carries a gradient.

    Attributes:
        loss: alpha * cross_entropy + (1 - alpha) * divergence, fp32.
        cross_entropy: -log p(label) in nats, fp32; 0 where there is no label.
        divergence: D after clipping, in nats, fp32; None at alpha = 1.
        clipped: Share of the row's vocabulary terms whose gradient the clip removed, fp32.
        top1_columns: Column the drafter would draft greedily, int64.
    """

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor | None
    clipped: Tensor
    top1_columns: Tensor


def row_losses(
    hidden: Tensor, target_hidden: Tensor | None, labels: Tensor, head: DraftHead, objective: RowObjective
) -> RowLosses:
    """Compare the draft distribution p with the target's q, row by row, in fp32 (fp64 for fp64 inputs).

    With p = softmax(head hidden) and q = softmax(head target_hidden), both over the columns of the head, the mask
    token left out:

        CE         = -log p(label)                                       0 without a label
        reverse KL = sum_v min(p_v (log p_v - log q_v), max_term_nats)
        forward KL = sum_v min(q_v (log q_v - log p_v), max_term_nats)
        D          = min(KL, max_row_nats)

    A clipped term is a constant: it has no gradient, and the other terms of its row keep theirs. Only positive terms
    can be clipped, so a clipped D may be negative.

    Reduced vocabulary: q is the target's distribution restricted to the columns and renormalised, in every row. The
    unclipped reverse KL to the full q differs from that by -log q(columns), which no drafter can change; without the
    renormalisation this constant would sit in the terms and make them clip. A label outside has no CE; its row still
    learns from D, since at temperature > 0 the target may sample something inside.

    Rows are processed in chunks of full width, each with its gradient while its logits exist: three matmuls a row,
    as many as the plain computation; making logits again in the backward pass, or in tiles of the vocabulary, takes
    five or six. Peak memory is about four chunks of logits and [N, H]. `hidden` alone gets a gradient.

    Args:
        hidden: [N, H] final hidden states of the drafter.
        target_hidden: [N, H] last hidden states of the target, each of the position before the label; None at
            alpha = 1.
        labels: [N] int64 columns, -1 for none.
        head: Maps both to logits.
        objective: What to compute.

    Source: AdaFlash (arXiv:2607.19223) for the clipped reverse KL; OSD (arXiv:2310.07177) for the forward KL.
    """
    assert target_hidden is not None or objective.alpha == 1, "a divergence needs the target's hidden states"
    outputs = _RowLosses.apply(hidden, target_hidden, labels, head, objective)  # type: ignore[no-untyped-call]
    return RowLosses(*outputs)


@torch.no_grad()
def top1_token_ids(hidden: Tensor, weight: Tensor, chunk_elements: int = CHUNK_ELEMENTS) -> Tensor:
    """Return the target's most probable token over its full vocabulary, the label of the cross-entropy.

    Args:
        hidden: [N, H] last hidden states of the target.
        weight: [V, H] of its LM head.
        chunk_elements: Logits that may exist at once.

    Returns:
        [N] int64 target ids.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    rows = _chunk_rows(chunk_elements, len(weight))
    chunks = [hidden[begin : begin + rows].to(dtype) for begin in range(0, max(1, len(hidden)), rows)]
    return torch.cat([_project(chunk, weight, chunk_elements).argmax(-1) for chunk in chunks])


def _chunk_rows(chunk_elements: int, num_columns: int) -> int:
    return max(1, chunk_elements // num_columns)


def _project(rows: Tensor, weight: Tensor, chunk_elements: int) -> Tensor:
    """Return rows @ weight.T in the dtype of the rows, [r, H] -> [r, V]; a narrower weight is widened in tiles."""
    if weight.dtype == rows.dtype:
        return rows @ weight.T
    logits = rows.new_empty(len(rows), len(weight))
    tile = _chunk_rows(chunk_elements, weight.shape[1])
    for begin in range(0, len(weight), tile):
        logits[:, begin : begin + tile] = rows @ weight[begin : begin + tile].to(rows.dtype).T
    return logits


def _project_back(gradients: Tensor, weight: Tensor, chunk_elements: int) -> Tensor:
    """Return gradients @ weight in the dtype of the gradients, [r, V] -> [r, H]."""
    if weight.dtype == gradients.dtype:
        return gradients @ weight
    tile = _chunk_rows(chunk_elements, weight.shape[1])
    result = gradients.new_zeros(len(gradients), weight.shape[1])
    for begin in range(0, len(weight), tile):
        result += gradients[:, begin : begin + tile] @ weight[begin : begin + tile].to(gradients.dtype)
    return result


class _ChunkResult(NamedTuple):
    """Results of a chunk of r rows as in `RowLosses`, and the gradient of each row's loss, [r, H] or None."""

    losses: RowLosses
    gradient: Tensor | None


class _Terms(NamedTuple):
    """D of r rows [r], the share of terms clipped [r], and dD/dlogits [r, Vd]."""

    divergence: Tensor
    clipped: Tensor
    gradient: Tensor


class _RowLosses(torch.autograd.Function):
    """Makes gradients in the forward pass, where a chunk's logits exist, and scales them in the backward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        target_hidden: Tensor | None,
        labels: Tensor,
        head: DraftHead,
        objective: RowObjective,
    ) -> tuple[Tensor | None, ...]:
        """Compute all chunks."""
        rows = _chunk_rows(objective.chunk_elements, len(head.weight))
        needs_gradient: bool = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        chunks = [
            _chunk(
                hidden[begin : begin + rows],
                None if target_hidden is None else target_hidden[begin : begin + rows],
                labels[begin : begin + rows],
                head,
                objective,
                needs_gradient,
            )
            for begin in range(0, max(1, len(hidden)), rows)
        ]
        merged = [
            None if columns[0] is None else torch.cat(columns)
            for columns in zip(*(chunk.losses for chunk in chunks), strict=True)
        ]
        if needs_gradient:
            gradients = [chunk.gradient for chunk in chunks if chunk.gradient is not None]
            ctx.save_for_backward(torch.cat(gradients))
        ctx.mark_non_differentiable(*(column for column in merged[1:] if column is not None))
        return tuple(merged)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Scale each row's gradient."""
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * grad_loss[:, None].to(gradient.dtype), None, None, None, None


def _chunk(
    hidden: Tensor,
    target_hidden: Tensor | None,
    labels: Tensor,
    head: DraftHead,
    objective: RowObjective,
    needs_gradient: bool,
) -> _ChunkResult:
    """Compute r rows at once; see `row_losses`."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    alpha, chunk_elements = objective.alpha, objective.chunk_elements
    log_p = _log_softmax(_project(hidden.to(dtype), head.weight, chunk_elements), head.mask_column)  # [r, Vd]
    top1 = log_p.argmax(-1)
    learnable = (labels >= 0).to(dtype)
    picked = labels.clamp_min(0)[:, None]
    cross_entropy = torch.where(labels >= 0, -log_p.gather(1, picked).squeeze(1), 0.0)
    p = log_p.exp()
    divergence, clipped, gradient = None, torch.zeros_like(cross_entropy), None
    loss = alpha * cross_entropy
    if target_hidden is not None and alpha < 1:
        log_q = _log_softmax(_project(target_hidden.to(dtype), head.weight, chunk_elements), head.mask_column)
        divergence, clipped, gradient = _divergence(p, log_p, log_q, head.mask_column, objective)
        loss = loss + (1 - alpha) * divergence
    if needs_gradient:
        # dCE/dlogits = p - onehot(label)
        gradient = torch.zeros_like(p) if gradient is None else gradient.mul_(1 - alpha)
        gradient.addcmul_(p, alpha * learnable[:, None])
        gradient.scatter_add_(1, picked, -alpha * learnable[:, None])
        gradient = _project_back(gradient, head.weight, chunk_elements).to(hidden.dtype)
    return _ChunkResult(RowLosses(loss, cross_entropy, divergence, clipped, top1), gradient)


def _log_softmax(logits: Tensor, mask_column: int | None) -> Tensor:
    """Return log softmax over the columns but `mask_column`, in place of the logits."""
    if mask_column is not None:
        logits[:, mask_column] = float("-inf")
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _divergence(p: Tensor, log_p: Tensor, log_q: Tensor, mask_column: int | None, objective: RowObjective) -> _Terms:
    """Compute D from p and log-probabilities; `log_q` and `log_p` are used up.

    dD/dlogit_j = g_j - p_j sum_v g_v with g_v = [v not clipped] (term_v + p_v) for the reverse KL,
    and [v not clipped] (-q_v) for the forward KL.
    """
    if objective.divergence == "reverse_kl":
        _blank(mask_column, log_p, log_q)
        terms = log_p.sub_(log_q).mul_(p)
        pull = log_q.copy_(terms).add_(p)
    else:
        q = log_q.exp()
        _blank(mask_column, log_p, log_q)
        terms = log_q.sub_(log_p).mul_(q)
        pull = q.neg_()
    clipped = terms.new_zeros(len(terms))
    if objective.max_term_nats is not None:
        over = terms > objective.max_term_nats
        pull.masked_fill_(over, 0.0)
        clipped = over.sum(-1).to(terms.dtype) / terms.shape[-1]
        terms.clamp_max_(objective.max_term_nats)
    divergence = terms.sum(-1)
    gradient = pull.addcmul_(p, pull.sum(-1, keepdim=True), value=-1)
    if objective.max_row_nats is not None:
        over = divergence > objective.max_row_nats
        gradient.masked_fill_(over[:, None], 0.0)
        clipped = torch.maximum(clipped, over.to(clipped.dtype))
        divergence = divergence.clamp_max(objective.max_row_nats)
    return _Terms(divergence, clipped, gradient)


def _blank(mask_column: int | None, *log_probabilities: Tensor) -> None:
    """Replace -inf by 0 in a column of probability 0, whose term is then 0 instead of NaN."""
    if mask_column is not None:
        for tensor in log_probabilities:
            tensor[:, mask_column] = 0.0
