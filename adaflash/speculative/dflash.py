# SPDX-License-Identifier: Apache-2.0
"""The DFlash block drafter: target features become context K/V, a masked block becomes drafts in one forward.

Source: DFlash (arXiv:2602.06036). The embedding and the LM head are the target's; reading files is `drafter_loader`'s
business.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from adaflash.cache.kv_cache import KVCache
from adaflash.models.layers import Linear, RMSNorm
from adaflash.models.rope import RotaryEmbedding
from adaflash.ops.backend import Backend, LinearFn
from adaflash.ops.metadata import PackedBatch, SamplingMetadata
from adaflash.speculative.base import BlockStates, DraftBlock, Drafter, LengthHead
from adaflash.speculative.drafter_config import DrafterConfig
from adaflash.speculative.drafter_layers import DrafterLayer, FusedContext
from adaflash.speculative.length_head import ThresholdLengthHead

# An id fits a signed 64-bit number and is never negative.
_CONTEXT_ID_BYTES = 7


class DFlashDrafter(Drafter, nn.Module):
    """Drafts up to W - 1 tokens per sequence from a block [anchor, mask x (w - 1)], w <= W.

    Weights are uninitialised until loaded; `rebuild_fused` must follow every change of them.

    Args:
        config: The architecture.
        embed: The target's embedding, ids [...] -> [..., H].
        head: The target's LM head, [R, H] -> [R, Vd], restricted to `column_token_ids` when those are given.
        column_token_ids: [Vd] int64 target id of each logits column; None when columns are target ids.
        backend: Where the ops run.
        dtype: Computation dtype; the length head stays in fp32.

    Attributes:
        length_head: The head that came with the checkpoint, or None.
    """

    length_head: LengthHead | None

    def __init__(
        self,
        config: DrafterConfig,
        embed: Callable[[Tensor], Tensor],
        head: LinearFn,
        column_token_ids: Tensor | None,
        backend: Backend,
        dtype: torch.dtype,
    ) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.backend = backend
        self.dtype = dtype
        self.version = self.context_id = 0
        self.draft_block_size = config.draft_block_size
        self.mask_token_id = config.mask_token_id
        self.tap_layer_ids = config.tap_layer_ids
        self.max_position_embeddings = config.max_position_embeddings
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.column_token_ids = column_token_ids
        self.embed, self.head = embed, head
        self._mask_column = _column_of(config.mask_token_id, column_token_ids)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(len(config.tap_layer_ids) * hidden_size, hidden_size, False, backend, dtype)
        self.hidden_norm = RMSNorm(hidden_size, eps, backend, dtype)
        self.layers = nn.ModuleList(DrafterLayer(config, kind, backend, dtype) for kind in config.layer_attention)
        self.norm = RMSNorm(hidden_size, eps, backend, dtype)
        self.rotary = RotaryEmbedding(config.rope, backend.device)
        dim = config.length_head_dim
        self.length_head = None if dim is None else ThresholdLengthHead(hidden_size, dim).to(backend.device)
        self._fused: FusedContext | None = None

    # ---- what a trainer shares ---------------------------------------------------------------------------------

    def context_features(self, taps: Tensor) -> Tensor:
        """Return the context features, [T, len(tap_layer_ids) * H] -> [T, H]; every layer projects the same ones."""
        features: Tensor = self.hidden_norm(self.fc(taps)).normed
        return features

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of final hidden states, [R, H] -> [R, Vd]; -inf for the mask token, written in place."""
        logits = self.head(hidden)
        if self._mask_column is not None:
            logits[:, self._mask_column] = float("-inf")
        return logits

    # ---- Drafter -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write_context(self, taps: Tensor, positions: Tensor, slot_mapping: Tensor, kv_: KVCache) -> None:
        """See `Drafter.write_context`."""
        assert self._fused is not None, "rebuild_fused must follow loading"
        cos, sin = self.rotary.cos_sin(positions)
        context = self._fused.project(self.context_features(taps), cos, sin)
        for index, (k_cache, v_cache) in enumerate(zip(kv_.k, kv_.v, strict=True)):
            self.backend.write_kv(context.k[:, index], context.v[:, index], k_cache, v_cache, slot_mapping)

    @torch.no_grad()
    def block_states(self, batch: PackedBatch, kv_: KVCache) -> BlockStates:
        """See `Drafter.block_states`."""
        num_seqs, width = batch.num_seqs, batch.query_lens_cpu[0]
        assert 2 <= width <= self.draft_block_size, f"a block has 2 to {self.draft_block_size} rows, not {width}"
        assert all(query_len == width for query_len in batch.query_lens_cpu), "all blocks of a forward are equally wide"
        hidden = self._forward_block(batch, kv_).view(num_seqs, width, -1)  # [S, w, H]
        logits = self.draft_logits(hidden[:, 1:].flatten(0, 1))  # [S * (w - 1), Vd]
        has_ratio = self.length_head is not None and width == self.draft_block_size  # as it was trained
        return BlockStates(
            hidden,
            logits.view(num_seqs, width - 1, -1),
            max_probability(logits).view(num_seqs, width - 1),
            self.length_head.predict(hidden) if has_ratio and self.length_head is not None else None,
        )

    @torch.no_grad()
    def choose(self, states: BlockStates, sampling: SamplingMetadata, keep_logits: bool = False) -> DraftBlock:
        """See `Drafter.choose`."""
        if sampling.column_token_ids is None and self.column_token_ids is not None:
            sampling = dataclasses.replace(sampling, column_token_ids=self.column_token_ids)
        columns = self.backend.sample(states.logits.flatten(0, 1), sampling)
        token_ids = columns if self.column_token_ids is None else self.column_token_ids[columns]
        return DraftBlock(
            token_ids=token_ids.view(states.confidence.shape),
            logits=states.logits if keep_logits else None,
            confidence=states.confidence,
            length_ratio=states.length_ratio,
            hidden=states.hidden,
        )

    def _forward_block(self, batch: PackedBatch, kv_: KVCache) -> Tensor:
        """Run the layers over packed blocks and return the normed states [S * w, H]; writes the lookahead slots."""
        cos, sin = self.rotary.cos_sin(batch.positions)
        meta = self.backend.attention_metadata(batch)
        scale = self.head_dim**-0.5
        hidden = self.embed(batch.token_ids)  # [S * w, H]
        for layer, k_cache, v_cache in zip(self.layers, kv_.k, kv_.v, strict=True):
            assert isinstance(layer, DrafterLayer), "the drafter's layers are DrafterLayers"
            q, k, v = layer.block_inputs(hidden, cos, sin)
            self.backend.write_kv(k, v, k_cache, v_cache, batch.slot_mapping)
            causal, window = layer.attention.causal, layer.attention.window
            hidden = layer.finish(
                hidden, self.backend.paged_attention(q, k_cache, v_cache, meta, scale, causal, window)
            )
        normed: Tensor = self.norm(hidden).normed
        return normed

    # ---- weights -----------------------------------------------------------------------------------------------

    def rebuild_fused(self) -> None:
        """Bring the fused copy of the context projections up to date, in place; call after every weight change."""
        attentions = [layer.self_attn for layer in self.layers if isinstance(layer, DrafterLayer)]
        if self._fused is None:
            self._fused = FusedContext(attentions, self.backend)
        else:
            self._fused.rebuild(attentions)

    def identify_context(self) -> None:
        """Set `context_id` from the weights that write context rows; before `pack`, which drops them."""
        assert self._fused is not None, "rebuild_fused must follow loading"
        written_with = (self.fc.weight, self.hidden_norm.weight, *self._fused.weights())
        digest = hashlib.sha256()
        for tensor in written_with:
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        self.context_id = int.from_bytes(digest.digest()[:_CONTEXT_ID_BYTES], "big")

    def take_weights(self, other: Drafter) -> None:
        """See `Drafter.take_weights`."""
        assert isinstance(other, DFlashDrafter), "versions are of one architecture"
        with torch.no_grad():
            for (name, mine), (other_name, theirs) in zip(
                self.named_parameters(), other.named_parameters(), strict=True
            ):
                assert name == other_name, "versions have the same weights"
                mine.copy_(theirs)
        self.rebuild_fused()
        self.version, self.context_id = other.version, other.context_id

    def pack(self) -> None:
        """Replace linear weights by the backend's packed form, if it has one; new weights then need a new drafter."""
        assert self._fused is not None, "rebuild_fused must come before pack"
        if not self.backend.packs_linears:
            return
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(self.backend)
        self._fused.pack()


def max_probability(logits: Tensor) -> Tensor:
    """Return the largest softmax probability of each row, exp(max - logsumexp), [R, V] -> [R] fp32."""
    wide = logits.float()
    return (wide.amax(-1) - wide.logsumexp(-1)).exp()


def _column_of(token_id: int, column_token_ids: Tensor | None) -> int | None:
    if column_token_ids is None:
        return token_id
    columns = (column_token_ids == token_id).nonzero().flatten().tolist()
    return int(columns[0]) if columns else None
