# SPDX-License-Identifier: Apache-2.0
"""Chunked row losses against plain autograd in fp64."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adaflash.training.row_losses import DraftHead, RowObjective, row_losses, top1_token_ids

HIDDEN, VOCAB, MASK = 12, 41, 40
LIMITS = {"none": (None, None), "terms": (0.05, None), "rows": (None, 0.6), "both": (0.1, 0.4)}


class Rows(NamedTuple):
    hidden: Tensor
    target_hidden: Tensor
    labels: Tensor
    head: DraftHead


def make_rows(num_rows: int, num_columns: int | None, seed: int = 0, dtype: torch.dtype = torch.float64) -> Rows:
    """Rows with every kind of label; `num_columns` None is the full vocabulary, with the mask token in it."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64) * 0.7
    ids = None if num_columns is None else torch.randperm(VOCAB, generator=generator)[:num_columns]
    head = DraftHead(weight.to(dtype), ids, MASK)
    hidden, target_hidden = torch.randn(2, num_rows, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    labels = head.columns(top1_token_ids(target_hidden, weight.to(dtype)))
    return Rows(hidden.requires_grad_(), target_hidden, labels, head)


def plain_losses(rows: Rows, alpha: float, divergence: str, max_term: float | None, max_row: float | None) -> Tensor:
    """The definition, whole tensors, autograd."""
    weight = rows.head.weight.double()
    logits = [h.double() @ weight.T for h in (rows.hidden, rows.target_hidden)]
    if rows.head.mask_column is not None:
        blocked = torch.arange(len(weight)) == rows.head.mask_column
        logits = [part.masked_fill(blocked, -1e30) for part in logits]
    log_p, log_q = (part.log_softmax(-1) for part in logits)
    cross_entropy = F.cross_entropy(logits[0], rows.labels, ignore_index=-1, reduction="none")
    terms = log_p.exp() * (log_p - log_q) if divergence == "reverse_kl" else log_q.exp() * (log_q - log_p)
    total = (terms if max_term is None else terms.clamp(max=max_term)).sum(-1)
    total = total if max_row is None else total.clamp(max=max_row)
    return alpha * cross_entropy + (1 - alpha) * total


def objective(
    alpha: float = 0.8, divergence: Any = "reverse_kl", limits: str = "terms", chunk: int = 1
) -> RowObjective:
    max_term, max_row = LIMITS[limits]
    return RowObjective(
        alpha, divergence, max_term, None if max_row is None else torch.tensor(max_row, dtype=torch.float64), chunk
    )


def gradient(losses: Tensor, rows: Rows) -> Tensor:
    """Gradient of a weighted sum, so that rows must not be mixed up."""
    scale = torch.linspace(0.5, 2.0, len(losses), dtype=losses.dtype)
    (result,) = torch.autograd.grad((losses * scale).sum(), rows.hidden)
    return result


@pytest.mark.parametrize("num_columns", [None, 17])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.0])
def test_values_and_gradients_equal_plain_autograd_in_fp64(
    alpha: float, divergence: str, limits: str, num_columns: int | None
) -> None:
    for seed, num_rows in enumerate((1, 7, 30)):
        rows = make_rows(num_rows, num_columns, seed)
        got = row_losses(*rows, objective(alpha, divergence, limits, chunk=100))
        expected = plain_losses(rows, alpha, divergence, *LIMITS[limits])
        torch.testing.assert_close(got.loss, expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(gradient(got.loss, rows), gradient(expected, rows), atol=1e-10, rtol=1e-10)


def test_gradients_pass_gradcheck() -> None:
    for divergence, limits in itertools.product(("reverse_kl", "forward_kl"), ("none", "terms")):
        rows = make_rows(4, 17)
        settings = objective(0.3, divergence, limits)

        def loss(hidden: Tensor, rows: Rows = rows, settings: RowObjective = settings) -> Tensor:
            return row_losses(hidden, rows.target_hidden, rows.labels, rows.head, settings).loss

        assert torch.autograd.gradcheck(loss, (rows.hidden,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_narrow_inputs_are_computed_in_fp32(divergence: str, dtype: torch.dtype) -> None:
    rows = make_rows(20, None, dtype=dtype)
    got = row_losses(*rows, objective(0.5, divergence, "none", chunk=200))
    assert got.loss.dtype == torch.float32
    expected = plain_losses(rows, 0.5, divergence, None, None)
    torch.testing.assert_close(got.loss.double(), expected, atol=1e-5, rtol=1e-5)
    # The gradient is rounded once, to the dtype of `hidden`.
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(gradient(got.loss, rows), gradient(expected, rows), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limits", LIMITS)
def test_the_chunk_size_changes_nothing(limits: str, dtype: torch.dtype) -> None:
    rows = make_rows(23, 17, dtype=dtype)
    whole = row_losses(*rows, objective(limits=limits, chunk=10**6))
    whole_gradient = gradient(whole.loss, rows)
    for chunk in (1, 17, 100):
        part = row_losses(*rows, objective(limits=limits, chunk=chunk))
        torch.testing.assert_close(part.loss, whole.loss, atol=1e-6, rtol=1e-6)
        # Rounded to the dtype of `hidden` at the end, so that one ulp may differ.
        tolerance = 1e-6 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(gradient(part.loss, rows), whole_gradient, atol=tolerance, rtol=tolerance)
        assert torch.equal(part.top1_columns, whole.top1_columns)
        assert torch.equal(part.clipped, whole.clipped)


def test_a_clipped_term_loses_its_gradient_and_the_others_keep_theirs() -> None:
    # One column per feature: logits are the hidden state. The drafter is sure of column 0, the target is not.
    head = DraftHead(torch.eye(4, dtype=torch.float64), None, 3)
    hidden = torch.tensor([[3.0, 0.0, -1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    rows = Rows(hidden, torch.tensor([[-2.0, 1.0, 0.5, 0.0]], dtype=torch.float64), torch.tensor([-1]), head)
    p, q = (h[0, :3].softmax(-1) for h in (rows.hidden.detach(), rows.target_hidden))
    terms = p * (p / q).log()
    limit = 0.5
    assert (terms > limit).tolist() == [True, False, False]
    got = row_losses(*rows, RowObjective(0.0, "reverse_kl", limit))
    assert got.divergence is not None
    torch.testing.assert_close(got.divergence[0], limit + terms[1:].sum())
    assert got.clipped.item() == pytest.approx(1 / 4)
    # Only terms 1 and 2 pull: d term_v / d logit_j = (term_v + p_v) ([v = j] - p_j)
    pull = (terms + p) * torch.tensor([0.0, 1.0, 1.0])
    expected = F.pad(pull - p * pull.sum(), (0, 1))
    torch.testing.assert_close(gradient(got.loss, rows)[0], 0.5 * expected)
    whole_row = row_losses(*rows, RowObjective(0.0, "reverse_kl", None, torch.tensor(limit)))
    assert whole_row.clipped.item() == 1
    assert not gradient(whole_row.loss, rows).any()


def test_labels_outside_the_reduced_vocabulary_have_no_cross_entropy_and_keep_their_divergence() -> None:
    rows = make_rows(30, 17)
    outside = rows.labels < 0
    assert 0 < outside.sum() < 30
    both = row_losses(*rows, objective(0.8, limits="none"))
    assert both.divergence is not None
    assert not both.cross_entropy[outside].any()
    assert both.cross_entropy[~outside].all()
    assert both.divergence[outside].all()
    only = row_losses(*rows, objective(1.0, limits="none"))
    moved = gradient(only.loss, rows).abs().sum(-1) > 0
    assert torch.equal(moved, ~outside)


def test_reverse_kl_pulls_like_the_one_to_the_full_vocabulary() -> None:
    rows = make_rows(10, 17)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(1, 30, 2)
    head = DraftHead(weight, ids, MASK)
    log_q = (rows.target_hidden @ weight.T).log_softmax(-1)[:, ids]  # of the full vocabulary, sums to less than 1
    log_p = (rows.hidden @ weight[ids].T).log_softmax(-1)
    full = (log_p.exp() * (log_p - log_q)).sum(-1)
    reduced = row_losses(*rows._replace(head=head), objective(0.0, limits="none")).loss
    assert (full - reduced > 0.01).any()
    torch.testing.assert_close(gradient(full, rows), gradient(reduced, rows))


def test_the_mask_token_is_in_neither_distribution() -> None:
    rows = make_rows(5, None)
    assert rows.head.mask_column == MASK
    sure = rows.head.weight.clone()
    sure[MASK] = 100.0
    shifted = rows._replace(head=DraftHead(sure, None, MASK))
    for a, b in zip(row_losses(*rows, objective()), row_losses(*shifted, objective()), strict=True):
        torch.testing.assert_close(a, b)
    assert rows.head.columns(torch.tensor([MASK, 3])).tolist() == [-1, 3]


def test_columns_and_token_ids_are_inverse() -> None:
    head = DraftHead(torch.randn(VOCAB, HIDDEN), torch.tensor([5, 2, MASK, 9]), MASK)
    assert head.mask_column == 2
    assert head.columns(torch.tensor([[9, 5], [MASK, 0]])).tolist() == [[3, 0], [-1, -1]]
    assert head.token_ids(torch.tensor([[3, 0], [-1, 1]])).tolist() == [[9, 5], [-1, 2]]
    whole = DraftHead(torch.randn(VOCAB, HIDDEN), None, MASK)
    assert whole.token_ids(torch.tensor([4, -1])).tolist() == [4, -1]


def test_extreme_logits_stay_finite() -> None:
    head = DraftHead(torch.eye(4), None, 3)
    hidden = torch.tensor([[300.0, -300.0, 0.0, 0.0]], requires_grad=True)
    target_hidden = torch.tensor([[-300.0, 300.0, 0.0, 0.0]])
    for divergence in ("reverse_kl", "forward_kl"):
        got = row_losses(hidden, target_hidden, torch.tensor([1]), head, objective(0.5, divergence, "none"))
        assert got.loss.isfinite().all()
        assert torch.autograd.grad(got.loss.sum(), hidden)[0].isfinite().all()


def test_no_rows_are_no_error() -> None:
    rows = make_rows(0, 17)
    got = row_losses(*rows, objective())
    assert got.loss.shape == (0,)
    got.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert rows.hidden.grad is not None


def test_no_gradient_is_made_when_none_is_asked_for() -> None:
    rows = make_rows(6, None)
    expected = row_losses(*rows, objective())
    with torch.no_grad():
        got = row_losses(*rows, objective())
    assert got.loss.grad_fn is None
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_only_the_loss_carries_a_gradient_and_only_to_the_drafter() -> None:
    rows = make_rows(6, None)
    target_hidden = rows.target_hidden.clone().requires_grad_()
    weight = rows.head.weight.clone().requires_grad_()
    head = DraftHead(weight, None, MASK)
    got = row_losses(rows.hidden, target_hidden, rows.labels, head, objective())
    assert [output.requires_grad for output in got if output is not None] == [True, False, False, False, False]
    got.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert target_hidden.grad is None
    assert weight.grad is None


def test_cross_entropy_alone_needs_no_teacher() -> None:
    rows = make_rows(6, None)
    alone = row_losses(rows.hidden, None, rows.labels, rows.head, objective(1.0))
    assert alone.divergence is None
    assert torch.equal(alone.loss, row_losses(*rows, objective(1.0)).loss)
    with pytest.raises(AssertionError, match="target's hidden states"):
        row_losses(rows.hidden, None, rows.labels, rows.head, objective(0.9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top1_does_not_depend_on_the_chunk(dtype: torch.dtype) -> None:
    rows = make_rows(30, None, dtype=dtype)
    expected = (rows.target_hidden.double() @ rows.head.weight.double().T).argmax(-1)
    for chunk in (1, 100, 10**6):
        assert torch.equal(top1_token_ids(rows.target_hidden, rows.head.weight, chunk), expected)


class AllocationRecorder(TorchDispatchMode):
    """Counts fp32 elements of new tensors: the largest, and the most alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = self.alive = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
                continue
            if tensor.untyped_storage()._cdata not in inputs:
                self._record(tensor)
        return result

    def _record(self, tensor: Tensor) -> None:
        size = tensor.numel()
        self.alive += size
        weakref.finalize(tensor, self._release, size)
        self.largest, self.peak = max(self.largest, size), max(self.peak, self.alive)

    def _release(self, size: int) -> None:
        self.alive -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_no_tensor_of_rows_times_vocabulary_is_ever_made(divergence: str, dtype: torch.dtype) -> None:
    num_rows, vocab, hidden_size, chunk = 2000, 49152, 576, 1 << 22
    head = DraftHead(torch.empty(vocab, 1), None, MASK)
    with FakeTensorMode(), AllocationRecorder() as recorder:  # shapes only: nothing is computed
        head.weight = torch.empty(vocab, hidden_size, dtype=dtype)
        hidden = torch.empty(num_rows, hidden_size, dtype=dtype, requires_grad=True)
        target_hidden = torch.empty(num_rows, hidden_size, dtype=dtype)
        labels = torch.empty(num_rows, dtype=torch.int64)
        recorder.alive = recorder.largest = recorder.peak = 0
        settings = RowObjective(0.8, divergence, 0.5, None, chunk)  # type: ignore[arg-type]
        row_losses(hidden, target_hidden, labels, head, settings).loss.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert num_rows * hidden_size < chunk < num_rows * vocab / 20
    assert chunk * 0.9 < recorder.largest <= chunk
    assert recorder.peak <= 5.5 * chunk
