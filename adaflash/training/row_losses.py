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

# fp32 logits of a chunk: 64 MB, in four buffers. Half of it is a tenth slower at a vocabulary of 151936, twice gains
# nothing (`tools/bench/losses.py`, one thread).
CHUNK_ELEMENTS = 1 << 24


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
    five or six. Peak memory is four chunks of logits, made once, and [N, H]. `hidden` alone gets a gradient.

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
    rows = _chunk_rows(chunk_elements, len(weight), len(hidden))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits_ = torch.empty(rows, len(weight), dtype=dtype, device=hidden.device)
    top1 = []
    for begin in range(0, max(1, len(hidden)), rows):
        chunk = hidden[begin : begin + rows].to(dtype)
        top1.append(_project(chunk, weight, chunk_elements, logits_[: len(chunk)]).argmax(-1))
    return torch.cat(top1)


def _chunk_rows(chunk_elements: int, num_columns: int, num_rows: int) -> int:
    return max(1, min(chunk_elements // num_columns, num_rows))


def _weight_tiles(weight: Tensor, chunk_elements: int) -> range:
    """Return where the row tiles of a weight begin that is too narrow to be used as it is, and their length as step."""
    return range(0, len(weight), max(1, chunk_elements // weight.shape[1]))


def _project(rows: Tensor, weight: Tensor, chunk_elements: int, logits_: Tensor) -> Tensor:
    """Write rows @ weight.T, [r, H] -> [r, V], in the dtype of the rows, and return it."""
    if weight.dtype == rows.dtype:
        return torch.mm(rows, weight.T, out=logits_)
    tiles = _weight_tiles(weight, chunk_elements)
    for begin in tiles:
        end = begin + tiles.step
        logits_[:, begin:end] = rows @ weight[begin:end].to(rows.dtype).T
    return logits_


def _project_back(gradients: Tensor, weight: Tensor, chunk_elements: int) -> Tensor:
    """Return gradients @ weight in the dtype of the gradients, [r, V] -> [r, H]."""
    if weight.dtype == gradients.dtype:
        return gradients @ weight
    tiles = _weight_tiles(weight, chunk_elements)
    result = gradients.new_zeros(len(gradients), weight.shape[1])
    for begin in tiles:
        end = begin + tiles.step
        result += gradients[:, begin:end] @ weight[begin:end].to(gradients.dtype)
    return result


class _Distribution(NamedTuple):
    """Probabilities of r rows over the columns, their logarithms, [r, Vd], and the most probable column [r].

    The mask token has probability 0, and 0 for its logarithm, so that its terms are 0 instead of NaN.
    """

    probabilities: Tensor
    log_probabilities: Tensor
    top1: Tensor


class _Workspace:
    """Two distributions' worth of chunk buffers, used again by every chunk.

    New ones per chunk stayed with the C allocator in pieces: 778 MB at 2000 x 49152, for 151 MB of chunks.
    """

    def __init__(self, num_rows: int, head: DraftHead, chunk_elements: int, like: Tensor) -> None:
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self.head, self.chunk_elements = head, chunk_elements
        self._shape = (num_rows, len(head.weight))
        self._buffers: list[Tensor] = []
        self._device = like.device

    def distribution(self, hidden: Tensor, index: int) -> _Distribution:
        """Return the distribution of some rows [r, H] in the buffers of `index`, 0 or 1."""
        while len(self._buffers) < 2 * index + 2:
            self._buffers.append(torch.empty(self._shape, dtype=self.dtype, device=self._device))
        probabilities_, logits_ = (buffer[: len(hidden)] for buffer in self._buffers[2 * index : 2 * index + 2])
        _project(hidden.to(self.dtype), self.head.weight, self.chunk_elements, logits_)
        mask_column = self.head.mask_column
        if mask_column is not None:
            logits_[:, mask_column] = float("-inf")
        largest, top1 = logits_.max(-1, keepdim=True)
        torch.exp(logits_.sub_(largest), out=probabilities_)
        total = probabilities_.sum(-1, keepdim=True)
        probabilities_.div_(total)
        logits_.sub_(total.log())
        if mask_column is not None:
            logits_[:, mask_column] = 0.0
        return _Distribution(probabilities_, logits_, top1.squeeze(1))


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
        rows = _chunk_rows(objective.chunk_elements, len(head.weight), len(hidden))
        workspace = _Workspace(rows, head, objective.chunk_elements, hidden)
        needs_gradient: bool = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        chunks = []
        for begin in range(0, max(1, len(hidden)), rows):
            part = slice(begin, begin + rows)
            target_part = None if target_hidden is None else target_hidden[part]
            chunks.append(_chunk(hidden[part], target_part, labels[part], workspace, objective, needs_gradient))
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
    workspace: _Workspace,
    objective: RowObjective,
    needs_gradient: bool,
) -> _ChunkResult:
    """Compute r rows at once; see `row_losses`."""
    alpha = objective.alpha
    draft = workspace.distribution(hidden, 0)
    p = draft.probabilities
    learnable = (labels >= 0).to(p.dtype)
    picked = labels.clamp_min(0)[:, None]
    cross_entropy = torch.where(labels >= 0, -draft.log_probabilities.gather(1, picked).squeeze(1), 0.0)
    loss = alpha * cross_entropy
    divergence, clipped, gradient = None, torch.zeros_like(cross_entropy), None
    if target_hidden is not None and alpha < 1:
        divergence, clipped, gradient = _divergence(draft, workspace.distribution(target_hidden, 1), objective)
        loss = loss + (1 - alpha) * divergence
    if needs_gradient:
        # dCE/dlogits = p - onehot(label)
        weight = alpha * learnable[:, None]
        gradient = p.mul_(weight) if gradient is None else gradient.mul_(1 - alpha).addcmul_(p, weight)
        gradient.scatter_add_(1, picked, -weight)
        gradient = _project_back(gradient, workspace.head.weight, objective.chunk_elements).to(hidden.dtype)
    return _ChunkResult(RowLosses(loss, cross_entropy, divergence, clipped, draft.top1), gradient)


def _divergence(draft: _Distribution, target: _Distribution, objective: RowObjective) -> _Terms:
    """Compute D; all but the draft's probabilities is overwritten.

    dD/dlogit_j = g_j - p_j sum_v g_v with g_v = [v not clipped] (term_v + p_v) for the reverse KL,
    and [v not clipped] (-q_v) for the forward KL.
    """
    p, q = draft.probabilities, target.probabilities
    terms = draft.log_probabilities.sub_(target.log_probabilities)
    if objective.divergence == "reverse_kl":
        pull = torch.add(terms.mul_(p), p, out=q)
    else:
        terms.mul_(q).neg_()
        pull = q.neg_()
    clipped = terms.new_zeros(len(terms))
    if objective.max_term_nats is not None:
        # As 0 and 1 in a buffer that is free by now: sums of booleans take eight bytes each.
        kept = target.log_probabilities.copy_(terms).le_(objective.max_term_nats)
        pull.mul_(kept)
        clipped = (terms.shape[1] - kept.sum(-1)) / terms.shape[1]
        terms.clamp_max_(objective.max_term_nats)
    divergence = terms.sum(-1)
    gradient = pull.addcmul_(p, pull.sum(-1, keepdim=True), value=-1)
    if objective.max_row_nats is not None:
        over = divergence > objective.max_row_nats
        gradient.masked_fill_(over[:, None], 0.0)
        clipped = torch.maximum(clipped, over.to(clipped.dtype))
        divergence = divergence.clamp_max(objective.max_row_nats)
    return _Terms(divergence, clipped, gradient)
