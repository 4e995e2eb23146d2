# SPDX-License-Identifier: Apache-2.0
"""Tries a drafter on a fixed input before it may serve: finite weights can still overflow."""

from __future__ import annotations

import torch

from adaflash.cache.kv_cache import KVCache
from adaflash.errors import CheckpointError
from adaflash.ops.metadata import SamplingMetadata
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.packing import PackEntry, pack

_CONTEXT_LEN = 48
_BLOCK_SIZE = 16
_SEED = 20260722


@torch.inference_mode()
def probe(drafter: DFlashDrafter) -> None:
    """Draft one block after a fixed context of random features, with a KV pool of its own.

    Args:
        drafter: Packed.

    Raises:
        CheckpointError: A draft logit or a length prediction is not finite.
    """
    width, device = drafter.draft_block_size, drafter.backend.device
    context_len = min(_CONTEXT_LEN, drafter.max_position_embeddings - width)
    num_blocks = -(-(context_len + width) // _BLOCK_SIZE)
    table = list(range(num_blocks))
    kv = KVCache.allocate(
        drafter.backend,
        drafter.num_layers,
        num_blocks,
        _BLOCK_SIZE,
        drafter.num_kv_heads,
        drafter.head_dim,
        drafter.dtype,
    )
    generator = torch.Generator().manual_seed(_SEED)
    taps_size = len(drafter.tap_layer_ids) * drafter.config.hidden_size
    taps = torch.randn(context_len, taps_size, generator=generator).to(device, drafter.dtype)
    positions = torch.arange(context_len, device=device)
    drafter.write_context(taps, positions, positions, kv)
    entry = PackEntry([0] + [drafter.mask_token_id] * (width - 1), context_len, table, 0)
    batch = pack([entry], _BLOCK_SIZE, device)
    block = drafter.propose(batch, kv, SamplingMetadata.greedy(width - 1, device), keep_logits=True)
    assert block.logits is not None, "the logits were asked for"
    finite = block.logits.float().logsumexp(-1).isfinite().all() and block.hidden.isfinite().all()
    if drafter.length_head is not None:
        finite = finite and drafter.length_head.predict(block.hidden).isfinite().all()
    if not finite:
        raise CheckpointError(
            f"drafter version {drafter.version}: what it drafts on a fixed input is not finite: "
            "its weights must be such that nothing overflows"
        )
