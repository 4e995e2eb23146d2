# SPDX-License-Identifier: Apache-2.0
"""What `draft_at` says of blocks besides their tokens is what serving would see."""

from __future__ import annotations

from pathlib import Path

import torch

from adaflash.models.loader import load_target
from adaflash.ops.backend import Backend
from adaflash.speculative.drafter_loader import load_drafter
from adaflash.training.blocks import TrainingSequence
from adaflash.training.replay import draft_at
from tests.conftest import TinyModelBuilder
from tests.tiny_drafters import TinyDrafterBuilder
from tests.unit.training.served_blocks import serve_block


def test_confidences_and_length_ratios_are_those_of_serving(
    tmp_path: Path, tiny_qwen3: TinyModelBuilder, tiny_drafter: TinyDrafterBuilder
) -> None:
    tiny_qwen3(tmp_path / "target")
    target = load_target(tmp_path / "target", Backend("cpu"))
    checkpoint = tiny_drafter(tmp_path / "drafter", tmp_path / "target", length_head=True)
    drafter = load_drafter(checkpoint, target, target.backend)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.arange(14)
    taps = torch.randn(13, len(drafter.tap_layer_ids) * drafter.config.hidden_size, generator=generator)
    anchors = torch.arange(4, 13)
    drafts = draft_at(drafter, TrainingSequence(token_ids, token_ids >= 4), taps, anchors)
    served = [serve_block(drafter, taps, anchor, int(token_ids[anchor])) for anchor in anchors.tolist()]
    torch.testing.assert_close(drafts.confidence, torch.cat([block.confidence for block in served]))
    assert drafter.length_head is not None
    ratios = torch.cat([drafter.length_head.predict(block.hidden) for block in served])
    assert drafts.length_ratio is not None
    torch.testing.assert_close(drafts.length_ratio, ratios)
    assert ratios.std() > 0, "different blocks have different predictions"
