# SPDX-License-Identifier: Apache-2.0
"""The training forward of a DFlash drafter: many blocks of whole sequences at once, dense and differentiable.

It runs the layer bodies that serve (`drafter_layers`); only how blocks attend differs. Serving appends one block to a
paged context; here the context of a sequence is projected once per layer, and a mask shows each block its own part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_config import LayerAttention
from adaflash.speculative.drafter_layers import BlockInputs, ContextKV, DrafterLayer
from adaflash.training.blocks import BlockGroup, DraftBlocks, attention_groups, visibility

# Blocks of a sequence that attend in one call: they compute scores against each other's keys only to mask them, so a
# call's waste grows with its square, while a smaller call is a smaller matmul.
BLOCKS_PER_CALL = 16


def draft_hidden(
    drafter: DFlashDrafter,
    taps: Tensor,
    blocks: DraftBlocks,
    blocks_per_call: int = BLOCKS_PER_CALL,
    context_drafter: DFlashDrafter | None = None,
) -> Tensor:
    """Return the drafter's final hidden states of every block, as `Drafter.propose` computes them one by one.

    Row 0 is the anchor's; rows 1 .. W - 1 through `drafter.draft_logits` are the draft logits. The result is
    differentiable in the drafter's parameters; the embedding is the target's and gets no gradient. Weights are read
    directly: a drafter that was packed cannot be trained, and `rebuild_fused` is needed before it serves again.

    Args:
        drafter: On the reference ops of any device; a device backend's own ops need not be differentiable.
        taps: [F, len(tap_layer_ids) * H] target features of all sequences, packed.
        blocks: At least one block, on the drafter's device.
        blocks_per_call: Blocks of a sequence that attend together; changes time and memory only.
        context_drafter: Version whose weights make the context's keys and values, as in the cached rows of requests
            that changed versions; None is `drafter` itself.

    Returns:
        [B, W, H].
    """
    assert len(taps) == sum(blocks.feature_lens), "taps hold S - 1 rows of every sequence"
    assert len(blocks.anchors), "there is nothing to draft without anchors"
    groups = attention_groups(blocks, blocks_per_call)
    masks = {attention: _group_masks(blocks, groups, attention) for attention in {*drafter.config.layer_attention}}
    writer = drafter if context_drafter is None else context_drafter
    features = writer.context_features(taps)  # [F, H]
    context_angles = drafter.rotary.cos_sin(blocks.context_positions)
    block_angles = drafter.rotary.cos_sin(blocks.positions.flatten())
    with torch.no_grad():
        hidden = drafter.embed(blocks.token_ids.flatten())  # [B * W, H]
    for layer, written in zip(drafter.layers, writer.layers, strict=True):
        assert isinstance(layer, DrafterLayer), "the drafter's layers are DrafterLayers"
        assert isinstance(written, DrafterLayer), "and so are those of its other versions"
        block = layer.block_inputs(hidden, *block_angles)
        context = written.self_attn.context_kv(features, *context_angles)
        hidden = layer.finish(hidden, _attend(block, context, groups, masks[layer.attention]))
    normed: Tensor = drafter.norm(hidden).normed
    return normed.view(*blocks.token_ids.shape, -1)


def _group_masks(blocks: DraftBlocks, groups: list[BlockGroup], attention: LayerAttention) -> list[Tensor]:
    """Return the mask of every group, each [G * W, C + G * W] bool."""
    return [
        visibility(blocks.positions[slice(*group.blocks)], group.context[1] - group.context[0], attention)
        for group in groups
    ]


def _attend(block: BlockInputs, context: ContextKV, groups: list[BlockGroup], masks: list[Tensor]) -> Tensor:
    """Attend every group to its context and itself, [B * W, Hq, D]."""
    width = len(block.q) // groups[-1].blocks[1]
    outputs = []
    for group, mask in zip(groups, masks, strict=True):
        rows = slice(group.blocks[0] * width, group.blocks[1] * width)
        keys = torch.cat((context.k[slice(*group.context)], block.k[rows]))  # [C + G * W, Hkv, D]
        values = torch.cat((context.v[slice(*group.context)], block.v[rows]))
        q, k, v = (part.transpose(0, 1)[None] for part in (block.q[rows], keys, values))  # [1, heads, rows, D]
        attended = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)
