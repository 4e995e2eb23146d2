# SPDX-License-Identifier: Apache-2.0
"""The training forward against the drafter as it serves, block by block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from adaflash.models.base import TargetModel
from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_loader import load_drafter
from adaflash.training.blocks import DraftBlocks, TrainingSequence, make_blocks
from adaflash.training.drafter_forward import draft_hidden
from adaflash.training.losses import DraftLoss, length_head_loss
from adaflash.training.row_losses import DraftHead
from tests.conftest import TinyModelBuilder
from tests.tiny_drafters import TinyDrafterBuilder
from tests.unit.training.served_blocks import served_logits

ATOL = 1e-4
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "reduced_vocabulary": {"draft_vocab_size": 31},
    "sliding": {"config": SLIDING},
    "sliding_reduced": {"config": SLIDING, "draft_vocab_size": 31},
    "sliding_non_causal": {"config": SLIDING | {"causal": False}},
    "window_shorter_than_the_block": {"config": SLIDING | {"sliding_window": 2}},
    "full_causal": {"dflash_config": {"causal": True}},
    "biases": {"config": {"attention_bias": True}},
    "one_kv_head": {"config": {"num_key_value_heads": 1, "num_attention_heads": 3}},
    "wide_block": {"config": {"block_size": 9}},
}
ANCHORS = ([1, 2, 9, 20], [], [0, 5, 6])
LENS = (24, 4, 8)


class Sample(NamedTuple):
    """Random sequences and target features, and the blocks at `ANCHORS`."""

    sequences: list[TrainingSequence]
    taps: list[Tensor]
    blocks: DraftBlocks

    def packed_taps(self) -> Tensor:
        return torch.cat(self.taps)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: TinyModelBuilder) -> Path:
    directory = tmp_path_factory.mktemp("target")
    tiny_qwen3(directory)
    return directory


@pytest.fixture(scope="module")
def target(target_dir: Path) -> TargetModel:
    return load_target(target_dir, Backend("cpu"))


@pytest.fixture(params=VARIANTS)
def drafter(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tiny_drafter: TinyDrafterBuilder,
    target_dir: Path,
    target: TargetModel,
) -> DFlashDrafter:
    return load_drafter(tiny_drafter(tmp_path, target_dir, **VARIANTS[request.param]), target, target.backend)


@pytest.fixture
def plain(tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel) -> DFlashDrafter:
    """Full and sliding layers, with a length head."""
    return load_drafter(tiny_drafter(tmp_path, target_dir, SLIDING, length_head=True), target, target.backend)


def make_sample(drafter: DFlashDrafter, anchors: tuple[list[int], ...] = ANCHORS) -> Sample:
    generator = torch.Generator().manual_seed(0)
    width = len(drafter.tap_layer_ids) * drafter.config.hidden_size
    sequences = [
        TrainingSequence(torch.randint(drafter.config.vocab_size - 1, (n,), generator=generator), torch.ones(n).bool())
        for n in LENS
    ]
    taps = [torch.randn(n - 1, width, generator=generator) for n in LENS]
    tensors = [torch.tensor(a, dtype=torch.int64) for a in anchors]
    blocks = make_blocks(sequences, tensors, drafter.draft_block_size, drafter.mask_token_id)
    return Sample(sequences, taps, blocks)


@torch.no_grad()
def trained_logits(drafter: DFlashDrafter, taps: Tensor, blocks: DraftBlocks, blocks_per_call: int = 16) -> Tensor:
    """Draft logits of every block, [B, K, Vd]."""
    hidden = draft_hidden(drafter, taps, blocks, blocks_per_call)[:, 1:]
    return drafter.draft_logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])


def test_logits_equal_those_of_serving(drafter: DFlashDrafter) -> None:
    sample = make_sample(drafter)
    expected = [
        served_logits(drafter, taps, sequence.token_ids, anchors)
        for taps, sequence, anchors in zip(sample.taps, sample.sequences, ANCHORS, strict=True)
        if anchors
    ]
    for blocks_per_call in (1, 3, 16):
        got = trained_logits(drafter, sample.packed_taps(), sample.blocks, blocks_per_call)
        torch.testing.assert_close(got, torch.cat(expected), atol=ATOL, rtol=0)


def test_context_of_another_version_is_attended_as_it_is_served(
    plain: DFlashDrafter, target: TargetModel, target_dir: Path, tiny_drafter: TinyDrafterBuilder, tmp_path: Path
) -> None:
    checkpoint = tiny_drafter(tmp_path / "other", target_dir, SLIDING, length_head=True, seed=7)
    drafter, other = plain, load_drafter(checkpoint, target, target.backend)
    sample = make_sample(drafter)
    with torch.no_grad():
        hidden = draft_hidden(drafter, sample.packed_taps(), sample.blocks, context_drafter=other)[:, 1:]
        trained = drafter.draft_logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
    served = torch.cat(
        [
            served_logits(drafter, taps, sequence.token_ids, anchors, other)
            for sequence, taps, anchors in zip(sample.sequences, sample.taps, ANCHORS, strict=True)
            if anchors
        ]
    )
    torch.testing.assert_close(trained, served, atol=ATOL, rtol=0)
    assert (trained - trained_logits(drafter, sample.packed_taps(), sample.blocks)).nan_to_num().abs().max() > ATOL


def test_another_block_does_not_change_a_block(drafter: DFlashDrafter) -> None:
    sample = make_sample(drafter)
    before = trained_logits(drafter, sample.packed_taps(), sample.blocks)
    changed = sample.blocks.token_ids.clone()
    changed[1] = (changed[1] + 1) % 90
    after = trained_logits(drafter, sample.packed_taps(), replace(sample.blocks, token_ids=changed))
    others = [0, 2, 3, 4, 5, 6]
    assert torch.equal(after[others], before[others])
    assert not torch.allclose(after[1], before[1])


def test_the_anchor_of_another_block_does_not_change_a_block(drafter: DFlashDrafter) -> None:
    sample, moved = make_sample(drafter), make_sample(drafter, ([1, 4, 9, 20], [], [0, 5, 6]))
    before, after = (trained_logits(drafter, s.packed_taps(), s.blocks) for s in (sample, moved))
    others = [0, 2, 3, 4, 5, 6]
    assert torch.equal(after[others], before[others])
    assert not torch.allclose(after[1], before[1])


def test_context_at_or_after_the_anchor_does_not_change_a_block(drafter: DFlashDrafter) -> None:
    sample = make_sample(drafter)
    before = trained_logits(drafter, sample.packed_taps(), sample.blocks)
    taps = [part.clone() for part in sample.taps]
    taps[0][9:] += 1.0
    after = trained_logits(drafter, torch.cat(taps), sample.blocks)
    unaffected = [0, 1, 2, 4, 5, 6]  # anchors 1, 2 and 9 of the first sequence, all of the third
    assert torch.equal(after[unaffected], before[unaffected])
    assert not torch.allclose(after[3], before[3])
    taps[0][8] += 1.0  # the last row the block at 9 sees
    assert not torch.allclose(trained_logits(drafter, torch.cat(taps), sample.blocks)[2], before[2])


def test_the_gradient_reaches_every_weight_of_the_drafter_and_nothing_of_the_target(
    plain: DFlashDrafter, target: TargetModel
) -> None:
    sample = make_sample(plain)
    assert isinstance(target, torch.nn.Module)
    weight = target.get_parameter("lm_head.weight")
    head = DraftHead(weight, plain.column_token_ids, plain.mask_token_id)
    hidden = draft_hidden(plain, sample.packed_taps(), sample.blocks)
    target_hidden = torch.randn(sum(sample.blocks.feature_lens), plain.config.hidden_size)[sample.blocks.teacher_rows]
    labels = head.columns(sample.blocks.label_token_ids)
    out = DraftLoss()(hidden[:, 1:], target_hidden, labels, sample.blocks.label_mask, head)
    assert isinstance(plain.length_head, torch.nn.Module)
    drafts = head.token_ids(out.draft_columns)
    length = length_head_loss(
        plain.length_head, hidden, drafts, sample.blocks.label_token_ids, sample.blocks.label_mask
    )
    assert length.num_blocks == 5
    (out.loss + length.loss).backward()  # type: ignore[no-untyped-call]
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in target.parameters())


def test_gradients_do_not_depend_on_how_blocks_are_grouped(plain: DFlashDrafter) -> None:
    sample = make_sample(plain)
    gradients = []
    for blocks_per_call in (1, 16):
        plain.zero_grad()
        draft_hidden(plain, sample.packed_taps(), sample.blocks, blocks_per_call).square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-3, rtol=1e-4)


def test_a_step_on_the_loss_lowers_it(plain: DFlashDrafter, target: TargetModel) -> None:
    sample = make_sample(plain)
    assert isinstance(target, torch.nn.Module)
    head = DraftHead(target.get_parameter("lm_head.weight"), plain.column_token_ids, plain.mask_token_id)
    target_hidden = torch.randn(sum(sample.blocks.feature_lens), 32, generator=torch.Generator().manual_seed(1))
    target_hidden = target_hidden[sample.blocks.teacher_rows]
    labels = head.columns((target_hidden @ head.weight.T).argmax(-1))
    parameters = [p for n, p in plain.named_parameters() if not n.startswith("length_head")]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses = []
    for _ in range(12):
        hidden = draft_hidden(plain, sample.packed_taps(), sample.blocks)
        loss = DraftLoss()(hidden[:, 1:], target_hidden, labels, sample.blocks.label_mask, head).loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_blocks_and_taps_must_belong_together(plain: DFlashDrafter) -> None:
    sample = make_sample(plain)
    with pytest.raises(AssertionError, match="S - 1 rows"):
        draft_hidden(plain, sample.packed_taps()[1:], sample.blocks)
    with pytest.raises(AssertionError, match="without anchors"):
        draft_hidden(plain, sample.packed_taps(), make_sample(plain, ([], [], [])).blocks)
