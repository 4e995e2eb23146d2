# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of a drafter on some trajectories, and its weights in the layout of the checkpoint."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from adaflash.models.checkpoint import Checkpoint
from adaflash.ops.backend import Backend
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_loader import canonical_name, drafter_slots, load_drafter
from adaflash.training.blocks import DraftBlocks, make_blocks, sample_anchors
from adaflash.training.drafter_forward import draft_hidden
from adaflash.training.drafter_layout import DrafterLayout
from adaflash.training.losses import DraftLoss, LengthLoss, LossOutput, PositionClip, TermClip, accepted_lens
from adaflash.training.losses import length_head_loss as length_loss
from adaflash.training.manifest import CONFIG_FILE, MODEL_FILE
from adaflash.training.optimisation import DrafterOptimizer, GradientNorms
from adaflash.training.position_weights import CreditWeights, DecayWeights, PositionWeights
from adaflash.training.row_losses import DraftHead
from adaflash.training.supervision import Supervision
from adaflash.training.target_head import TargetHead
from adaflash.training.trainer_config import TrainerConfig


@dataclass(frozen=True)
class StepReport:
    """What a step was about; measured before the weights moved, NaN where there was nothing to measure.

    Attributes:
        is_applied: Whether it moved the weights; a loss or gradient that is not finite never does.
        loss: Of the drafter.
        cross_entropy: Mean over labels, nats.
        divergence: Mean over labels, nats, as clipped; NaN when the loss has none.
        clipped: Share of vocabulary terms that were clipped.
        agreement: Share of labels drafted greedily, by position; a tuple of K.
        acceptance_length: Tokens a round would have emitted greedily, bonus token included, mean over complete blocks.
        length_head_loss: Mean squared error; NaN without a head or complete blocks.
        gradient_norm: Of the drafter, before clipping.
        num_anchors: Blocks.
        num_tokens: Labels.
    """

    is_applied: bool
    loss: float
    cross_entropy: float
    divergence: float
    clipped: float
    agreement: tuple[float, ...]
    acceptance_length: float
    length_head_loss: float
    gradient_norm: float
    num_anchors: int
    num_tokens: int

    def figures(self) -> dict[str, float]:
        """Return the finite figures by name, as a version's metrics; positions count from 1."""
        values = {
            "loss": self.loss,
            "cross_entropy": self.cross_entropy,
            "divergence": self.divergence,
            "clipped": self.clipped,
            "acceptance_length": self.acceptance_length,
            "length_head_loss": self.length_head_loss,
            "gradient_norm": self.gradient_norm,
        }
        values |= {f"agreement_{k}": value for k, value in enumerate(self.agreement, 1)}
        return {name: value for name, value in values.items() if math.isfinite(value)}


class Learner:
    """A drafter being trained: fp32 masters, optimizer and loss.

    Args:
        directory: The drafter's checkpoint; its layout and everything not learned stay as they are.
        head: The target's embedding and LM head.
        backend: Of the reference ops, which are differentiable.
        config: Loss and rates.

    Raises:
        CheckpointError: See `load_drafter`.
    """

    def __init__(self, directory: Path, head: TargetHead, backend: Backend, config: TrainerConfig) -> None:
        self.layout = DrafterLayout.of(directory)
        self.drafter: DFlashDrafter = load_drafter(directory, head, backend, torch.float32)
        self.optimizer = DrafterOptimizer(self.drafter, config)
        self._directory, self._config = directory, config
        self._loss = make_loss(config)
        self._head = DraftHead(head.weight, self.drafter.column_token_ids, self.drafter.mask_token_id)

    @property
    def num_labels(self) -> int:
        """K."""
        return self.drafter.draft_block_size - 1

    def step(self, batch: Sequence[Supervision], generator: torch.Generator) -> StepReport | None:
        """Train on anchors drawn from some trajectories; None when they have none.

        Args:
            batch: At least one.
            generator: Of the host; decides the anchors.
        """
        blocks = self._draw_blocks(batch, generator)
        if not len(blocks.anchors):
            return None
        device = batch[0].taps.device
        taps, hidden, top1 = (torch.cat([getattr(item, name) for item in batch]) for name in ("taps", "hidden", "top1"))
        blocks = blocks.to(device)
        drafted = draft_hidden(self.drafter, taps.float(), blocks)  # [B, W, H]
        rows = blocks.teacher_rows
        target_hidden = hidden[rows] if self._loss.alpha < 1 else None  # [B, K, H]
        labels = self._head.columns(top1[rows].clamp_min(0))
        out = self._loss(drafted[:, 1:], target_hidden, labels, blocks.label_mask, self._head)
        drafts = self._head.token_ids(out.draft_columns)
        length = self._length_loss(drafted, drafts, blocks)
        norms = self.optimizer.step(out.loss if length is None else out.loss + length.loss)
        return _report(out, length, norms, drafts, blocks)

    def _draw_blocks(self, batch: Sequence[Supervision], generator: torch.Generator) -> DraftBlocks:
        drafter = self.drafter
        sequences = [item.sequence for item in batch]
        anchors = [
            sample_anchors(
                sequence.response_mask,
                self._config.anchors_per_trajectory,
                generator,
                drafter.draft_block_size,
                drafter.max_position_embeddings,
            )
            for sequence in sequences
        ]
        return make_blocks(sequences, anchors, drafter.draft_block_size, drafter.mask_token_id)

    def _length_loss(self, hidden: Tensor, drafts: Tensor, blocks: DraftBlocks) -> LengthLoss | None:
        head = self.drafter.length_head
        if head is None or not self._config.train_length_head:
            return None
        return length_loss(head, hidden, drafts, blocks.label_token_ids, blocks.label_mask)

    # ---- weights ---------------------------------------------------------------------------------------------

    def load_weights(self, directory: Path) -> None:
        """Take over the weights of a version, and forget the moments.

        Raises:
            CheckpointError: A file is missing or corrupt, or it does not fit.
        """
        checkpoint = Checkpoint(directory)
        checkpoint.entries = {canonical_name(name): entry for name, entry in checkpoint.entries.items()}
        ignored = ("d2t", "t2d", r".*rotary_emb\.inv_freq")
        checkpoint.load(drafter_slots(self.drafter), "the drafter being trained", ignored)
        self.optimizer.reset()

    def write(self, directory: Path) -> None:
        """Write the masters in the checkpoint's dtypes, with what is not learned and the config unchanged."""
        slots = drafter_slots(self.drafter)
        original = {canonical_name(name): entry for name, entry in Checkpoint(self._directory).entries.items()}
        tensors = {
            name: original[name].read()
            if name in self.layout.constants
            else slots[name].to("cpu", original[name].dtype, copy=True).contiguous()
            for name in self.layout.tensors
        }
        save_file(tensors, directory / MODEL_FILE)
        shutil.copyfile(self._directory / CONFIG_FILE, directory / CONFIG_FILE)

    def state(self) -> dict[str, Tensor]:
        """Return masters and moments by name, on their device and not copied."""
        masters = {f"master/{name}": parameter.detach() for name, parameter in self.drafter.named_parameters()}
        return masters | {f"moment/{name}": tensor for name, tensor in self.optimizer.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned.

        Raises:
            KeyError: Something is missing.
            ValueError: Something is of another shape.
        """
        masters = {name: state[f"master/{name}"] for name, _ in self.drafter.named_parameters()}
        for name, parameter in self.drafter.named_parameters():
            if masters[name].shape != parameter.shape:
                raise ValueError(f"master {name} is of another shape than {list(parameter.shape)}")
        moments = {n.removeprefix("moment/"): t for n, t in state.items() if n.startswith("moment/")}
        self.optimizer.load_state(moments)
        with torch.no_grad():
            for name, parameter in self.drafter.named_parameters():
                parameter.copy_(masters[name])


def make_loss(config: TrainerConfig) -> DraftLoss:
    """Return the loss that a config names."""
    is_mixed = config.loss != "ce"
    clips: dict[str, TermClip | PositionClip | None] = {
        "term": TermClip(config.clip_nats),
        "position": PositionClip(config.clip_share),
        "none": None,
    }
    weightings: dict[str, PositionWeights] = {
        "decay": DecayWeights(config.decay_gamma),
        "credit": CreditWeights(config.credit_smoothing),
    }
    return DraftLoss(
        alpha=config.alpha if is_mixed else 1.0,
        divergence="forward_kl" if config.loss == "forward_kl" else "reverse_kl",
        clip=clips[config.clip] if is_mixed else None,
        weighting=weightings[config.weighting],
    )


@torch.no_grad()
def _report(
    out: LossOutput, length: LengthLoss | None, norms: GradientNorms | None, drafts: Tensor, blocks: DraftBlocks
) -> StepReport:
    mask = out.label_mask
    num_tokens = int(mask.sum())
    complete = mask.all(dim=1)
    accepted = accepted_lens(drafts, blocks.label_token_ids, mask)[complete].float()
    has_length = length is not None and int(length.num_blocks) > 0
    return StepReport(
        is_applied=norms is not None,
        loss=out.loss.item(),
        cross_entropy=out.cross_entropy.sum().item() / num_tokens,
        divergence=math.nan if out.divergence is None else out.divergence.sum().item() / num_tokens,
        clipped=out.clipped_terms().item(),
        agreement=tuple(out.agreement().tolist()),
        acceptance_length=accepted.mean().item() + 1,
        length_head_loss=length.loss.item() if length is not None and has_length else math.nan,
        gradient_norm=math.nan if norms is None else norms.drafter,
        num_anchors=len(mask),
        num_tokens=num_tokens,
    )
