# SPDX-License-Identifier: Apache-2.0
"""The paged DFlash drafter against a dense reference written from the paper."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adaflash.cache.kv_cache import KVCache
from adaflash.models.base import TargetModel
from adaflash.ops.backend import Backend
from adaflash.ops.cpu import CpuBackend
from adaflash.ops.metadata import PackedBatch, SamplingMetadata
from adaflash.speculative.base import DraftBlock
from adaflash.speculative.dflash import DFlashDrafter, max_probability
from adaflash.speculative.drafter_layers import DrafterLayer
from adaflash.speculative.drafter_loader import drafter_slots, load_drafter
from adaflash.speculative.packing import PackEntry, pack
from tests.tiny_drafters import TinyDrafterBuilder
from tests.unit.speculative.dense_dflash import DenseDFlash

BLOCK_SIZE, NUM_BLOCKS = 4, 64
CONTEXT_LENS = (1, 7, 19, 30)
ATOL = 1e-5
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


@dataclass(frozen=True)
class Variant:
    config: Mapping[str, object] | None = None
    dflash_config: Mapping[str, object] | None = None
    draft_vocab_size: int | None = None


VARIANTS = {
    "full_vocabulary": Variant(),
    "reduced_vocabulary": Variant(draft_vocab_size=31),
    "sliding": Variant(SLIDING),
    "sliding_non_causal": Variant(SLIDING, {"causal": False}),
    "full_causal": Variant(dflash_config={"causal": True}),
    "biases": Variant({"attention_bias": True}),
    "one_kv_head": Variant({"num_key_value_heads": 1, "num_attention_heads": 3}),
    "one_layer_one_kv_head": Variant({"num_key_value_heads": 1} | ONE_LAYER),
    "three_taps": Variant(dflash_config={"target_layer_ids": [2, 0, 1]}),
    "wide_block": Variant({"block_size": 9}),
}


class PagedSequences:
    """Random taps of some sequences, on shuffled blocks of one drafter cache."""

    def __init__(self, drafter: DFlashDrafter, seed: int = 0) -> None:
        config = drafter.config
        generator = torch.Generator().manual_seed(seed)
        self.drafter = drafter
        self.taps = [
            torch.randn(length, len(config.tap_layer_ids) * config.hidden_size, generator=generator)
            for length in CONTEXT_LENS
        ]
        self.anchors = torch.randint(config.vocab_size - 1, (len(CONTEXT_LENS),), generator=generator).tolist()
        blocks = list(range(NUM_BLOCKS))
        random.Random(seed).shuffle(blocks)
        needed = -(-(max(CONTEXT_LENS) + config.draft_block_size) // BLOCK_SIZE)
        self.tables = [blocks[index * needed : (index + 1) * needed] for index in range(len(CONTEXT_LENS))]
        self.kv = KVCache.allocate(
            drafter.backend,
            config.num_layers,
            NUM_BLOCKS,
            BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            drafter.dtype,
        )
        for cache in (*self.kv.k, *self.kv.v):
            cache.fill_(1e3)  # anything read that was not written shows

    def write(self, spans: Mapping[int, tuple[int, int]]) -> None:
        """Write the context rows [begin, end) of each sequence, packed into one call."""
        entries = [PackEntry([0] * (end - begin), begin, self.tables[s], 1) for s, (begin, end) in spans.items()]
        batch = pack(entries, BLOCK_SIZE, self.drafter.backend.device)
        taps = torch.cat([self.taps[s][begin:end] for s, (begin, end) in spans.items()])
        self.drafter.write_context(taps, batch.positions, batch.slot_mapping, self.kv)

    def write_all(self) -> None:
        self.write({s: (0, length) for s, length in enumerate(CONTEXT_LENS)})

    def batch(
        self, sequences: tuple[int, ...], lens: tuple[int, ...] = CONTEXT_LENS, num_drafts: int | None = None
    ) -> PackedBatch:
        masks = [self.drafter.mask_token_id] * (num_drafts or self.drafter.draft_block_size - 1)
        entries = [PackEntry([self.anchors[s], *masks], lens[s], self.tables[s], 1) for s in sequences]
        return pack(entries, BLOCK_SIZE, self.drafter.backend.device)

    def propose(
        self,
        sequences: tuple[int, ...] = (0, 1, 2, 3),
        lens: tuple[int, ...] = CONTEXT_LENS,
        num_drafts: int | None = None,
    ) -> DraftBlock:
        batch = self.batch(sequences, lens, num_drafts)
        sampling = SamplingMetadata.greedy(len(sequences) * (batch.query_lens_cpu[0] - 1))
        return self.drafter.propose(batch, self.kv, sampling, keep_logits=True)


def expected_logits(
    drafter: DFlashDrafter,
    directory: Path,
    target: TargetModel,
    sequences: PagedSequences,
    num_drafts: int | None = None,
) -> Tensor:
    dense = DenseDFlash(directory)
    rows = []
    for taps, anchor in zip(sequences.taps, sequences.anchors, strict=True):
        ids = torch.tensor([anchor] + [drafter.mask_token_id] * (num_drafts or drafter.draft_block_size - 1))
        rows.append(target.compute_logits(dense.hidden(taps, target.embed(ids))[1:]))
    logits = torch.stack(rows)
    logits[:, :, drafter.mask_token_id] = float("-inf")
    return logits if drafter.column_token_ids is None else logits[:, :, drafter.column_token_ids]


@pytest.fixture
def drafter(tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel) -> DFlashDrafter:
    return load_drafter(tiny_drafter(tmp_path, target_dir, length_head=True), target, target.backend)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Variant:
    return VARIANTS[request.param]


def build(tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, variant: Variant) -> Path:
    return tiny_drafter(
        tmp_path, target_dir, variant.config, variant.dflash_config, draft_vocab_size=variant.draft_vocab_size
    )


def test_paged_logits_equal_the_dense_reference(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel, variant: Variant
) -> None:
    directory = build(tmp_path, tiny_drafter, target_dir, variant)
    drafter = load_drafter(directory, target, target.backend)
    sequences = PagedSequences(drafter)
    sequences.write_all()
    block = sequences.propose()
    expected = expected_logits(drafter, directory, target, sequences)
    torch.testing.assert_close(block.logits, expected, atol=ATOL, rtol=1e-5)
    columns = expected.argmax(-1)
    ids = columns if drafter.column_token_ids is None else drafter.column_token_ids[columns]
    assert torch.equal(block.token_ids, ids)


def test_context_in_chunks_over_old_lookahead_slots_equals_the_dense_reference(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel, variant: Variant
) -> None:
    directory = build(tmp_path, tiny_drafter, target_dir, variant)
    drafter = load_drafter(directory, target, target.backend)
    sequences = PagedSequences(drafter)
    sequences.write({1: (0, 5), 3: (0, 11), 2: (0, 17)})
    sequences.propose((3, 1, 2), (1, 5, 17, 11))  # its block rows land on slots the next chunk overwrites
    sequences.write({2: (17, 19), 0: (0, 1), 3: (11, 30), 1: (5, 7)})
    expected = expected_logits(drafter, directory, target, sequences)
    torch.testing.assert_close(sequences.propose().logits, expected, atol=ATOL, rtol=1e-5)


def test_a_second_proposal_overwrites_the_block_of_the_first(drafter: DFlashDrafter) -> None:
    sequences = PagedSequences(drafter)
    sequences.write_all()
    first = sequences.propose()
    anchors, sequences.anchors = sequences.anchors, [5, 6, 7, 8]
    assert not torch.equal(sequences.propose().hidden, first.hidden)
    sequences.anchors = anchors
    torch.testing.assert_close(sequences.propose().hidden, first.hidden)


def test_blocks_do_not_see_each_other(drafter: DFlashDrafter) -> None:
    sequences = PagedSequences(drafter)
    sequences.write_all()
    together = sequences.propose()
    for s in range(len(CONTEXT_LENS)):
        torch.testing.assert_close(sequences.propose((s,)).hidden[0], together.hidden[s], atol=ATOL, rtol=1e-5)
    sequences.anchors[0] = (sequences.anchors[0] + 1) % 90
    changed = sequences.propose()
    assert not torch.allclose(changed.hidden[0], together.hidden[0])
    torch.testing.assert_close(changed.hidden[1:], together.hidden[1:], atol=ATOL, rtol=1e-5)


def test_no_context_rows_are_no_error(drafter: DFlashDrafter) -> None:
    sequences = PagedSequences(drafter)
    empty = torch.empty(0, dtype=torch.int64)
    drafter.write_context(sequences.taps[1][:0], empty, empty, sequences.kv)


@pytest.mark.parametrize("draft_vocab_size", [None, 96])
def test_the_mask_token_is_never_proposed(
    tmp_path: Path,
    tiny_drafter: TinyDrafterBuilder,
    target_dir: Path,
    target: TargetModel,
    draft_vocab_size: int | None,
) -> None:
    directory = tiny_drafter(
        tmp_path, target_dir, draft_vocab_size=draft_vocab_size, dflash_config={"mask_token_id": 3}
    )
    drafter = load_drafter(directory, target, target.backend)
    ids = torch.arange(97) if drafter.column_token_ids is None else drafter.column_token_ids
    column = int((ids == 3).nonzero())
    head = drafter.head
    drafter.head = lambda hidden: head(hidden).index_fill(1, torch.tensor([column]), 1e6)
    sequences = PagedSequences(drafter)
    sequences.write_all()
    block = sequences.propose()
    assert not (block.token_ids == 3).any()
    assert block.logits is not None
    assert (block.logits[:, :, column] == float("-inf")).all()
    assert block.confidence.max() < 1


def test_a_reduced_vocabulary_without_the_mask_token_keeps_every_column(drafter: DFlashDrafter) -> None:
    drafter = DFlashDrafter(
        drafter.config,
        drafter.embed,
        lambda hidden: hidden[:, :3],
        torch.tensor([1, 4, 8]),
        drafter.backend,
        drafter.dtype,
    )
    assert drafter.draft_logits(torch.ones(2, 32)).isfinite().all()


def test_confidence_is_the_largest_probability(drafter: DFlashDrafter) -> None:
    sequences = PagedSequences(drafter)
    sequences.write_all()
    block = sequences.propose()
    assert block.logits is not None
    torch.testing.assert_close(block.confidence, block.logits.softmax(-1).amax(-1))
    assert block.confidence.dtype == torch.float32
    assert max_probability(torch.tensor([[1e4, -1e4]], dtype=torch.bfloat16)).item() == 1.0


def test_logits_are_kept_only_on_request(drafter: DFlashDrafter) -> None:
    sequences = PagedSequences(drafter)
    sequences.write_all()
    block = drafter.propose(sequences.batch((0, 2)), sequences.kv, SamplingMetadata.greedy(6))
    assert block.logits is None
    assert block.token_ids.shape == block.confidence.shape == (2, 3)
    assert block.hidden.shape == (2, 4, 32)


def test_sampling_learns_the_ids_of_the_columns(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel
) -> None:
    class Recorder(Backend):
        def sample(self, logits: Tensor, sampling: SamplingMetadata) -> Tensor:
            seen.append(sampling)
            return super().sample(logits, sampling)

    seen: list[SamplingMetadata] = []
    drafter = load_drafter(tiny_drafter(tmp_path, target_dir, draft_vocab_size=20), target, Recorder("cpu"))
    sequences = PagedSequences(drafter)
    sequences.write_all()
    sequences.propose()
    assert drafter.column_token_ids is not None
    assert seen[0].column_token_ids is drafter.column_token_ids


def test_the_fused_context_equals_each_layers_own_projection(drafter: DFlashDrafter) -> None:
    sequences = PagedSequences(drafter)
    sequences.write({2: (0, 19)})
    features = drafter.context_features(sequences.taps[2])
    cos, sin = drafter.rotary.cos_sin(torch.arange(19))
    rows = [sequences.tables[2][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(19)]
    for index, layer in enumerate(drafter.layers):
        assert isinstance(layer, DrafterLayer)
        own = layer.self_attn.context_kv(features, cos, sin)
        torch.testing.assert_close(sequences.kv.k[index].flatten(0, 1)[rows], own.k.detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(sequences.kv.v[index].flatten(0, 1)[rows], own.v.detach(), atol=1e-6, rtol=1e-6)


def test_new_weights_reach_the_fused_copy_in_place(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel
) -> None:
    config = {"attention_bias": True}
    served = load_drafter(tiny_drafter(tmp_path / "old", target_dir, config, seed=1), target, target.backend)
    trained = load_drafter(tiny_drafter(tmp_path / "new", target_dir, config, seed=2), target, target.backend)
    old, new = PagedSequences(served), PagedSequences(trained)
    assert served._fused is not None
    assert served._fused.weight is not None
    address = served._fused.weight.data_ptr()
    for name, slot in drafter_slots(served).items():
        slot.copy_(drafter_slots(trained)[name])
    served.rebuild_fused()
    assert served._fused.weight.data_ptr() == address
    old.write_all()
    new.write_all()
    torch.testing.assert_close(old.propose().hidden, new.propose().hidden)


def test_a_packed_drafter_drafts_the_same(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel
) -> None:
    directory = tiny_drafter(tmp_path, target_dir, {"attention_bias": True}, draft_vocab_size=31)
    plain, packed = (load_drafter(directory, target, backend) for backend in (Backend("cpu"), CpuBackend("cpu")))
    packed.pack()
    blocks = []
    for drafter in (plain, packed):
        sequences = PagedSequences(drafter)
        sequences.write_all()
        blocks.append(sequences.propose())
    torch.testing.assert_close(blocks[0].logits, blocks[1].logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(blocks[0].token_ids, blocks[1].token_ids)
    with pytest.raises(AssertionError, match="packed"):
        packed.rebuild_fused()


def test_all_zero_weights_draft_finite_tokens(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel
) -> None:
    directory = tiny_drafter(tmp_path, target_dir, length_head=True, weights="zero")
    drafter = load_drafter(directory, target, target.backend)
    sequences = PagedSequences(drafter)
    sequences.write_all()
    block = sequences.propose()
    assert block.hidden.isfinite().all()
    assert block.confidence.isfinite().all()
    assert (block.confidence > 0).all()
    assert ((block.token_ids >= 0) & (block.token_ids < 97)).all()
    assert drafter.length_head is not None
    torch.testing.assert_close(drafter.length_head.predict(block.hidden), torch.full((4,), 0.5))


def test_bfloat16_stays_close_to_float32(
    tmp_path: Path, tiny_drafter: TinyDrafterBuilder, target_dir: Path, target: TargetModel, drafter: DFlashDrafter
) -> None:
    directory = tiny_drafter(tmp_path, target_dir, length_head=True)
    half = load_drafter(directory, target, target.backend, dtype=torch.bfloat16)
    half.embed = lambda ids: target.embed(ids).bfloat16()
    half.head = lambda hidden: target.compute_logits(hidden.float()).bfloat16()
    wide, narrow = PagedSequences(drafter), PagedSequences(half)
    narrow.taps = [taps.bfloat16() for taps in narrow.taps]
    wide.write_all()
    narrow.write_all()
    hidden = narrow.propose().hidden
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(hidden.float(), wide.propose().hidden, atol=0.25, rtol=0.1)


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_narrow_blocks_equal_the_dense_reference_of_their_width(
    tmp_path: Path,
    tiny_drafter: TinyDrafterBuilder,
    target_dir: Path,
    target: TargetModel,
    variant: Variant,
    num_drafts: int,
) -> None:
    directory = build(tmp_path, tiny_drafter, target_dir, variant)
    drafter = load_drafter(directory, target, target.backend)
    sequences = PagedSequences(drafter)
    sequences.write_all()
    block = sequences.propose(num_drafts=num_drafts)
    expected = expected_logits(drafter, directory, target, sequences, num_drafts)
    assert block.token_ids.shape == block.confidence.shape == (len(CONTEXT_LENS), num_drafts)
    assert block.hidden.shape[:2] == (len(CONTEXT_LENS), num_drafts + 1)
    torch.testing.assert_close(block.logits, expected, atol=2e-4, rtol=2e-4)
    assert drafter.draft_block_size > num_drafts + 1


def test_blocks_of_unlike_or_impossible_widths_are_refused(drafter: DFlashDrafter) -> None:
    sequences, width = PagedSequences(drafter), drafter.draft_block_size
    for query_lens, what in (([width, 2], "equally wide"), ([1], "2 to"), ([width + 1], "2 to")):
        batch = replace(sequences.batch((0,)), query_lens_cpu=query_lens)
        with pytest.raises(AssertionError, match=what):
            drafter.propose(batch, sequences.kv, SamplingMetadata.greedy(3))


def test_a_trainers_dense_pass_equals_serving_and_reaches_every_weight(drafter: DFlashDrafter) -> None:
    sequences = PagedSequences(drafter)
    sequences.write_all()
    served = sequences.propose((2,))
    context_len, width = CONTEXT_LENS[2], drafter.draft_block_size
    features = drafter.context_features(sequences.taps[2])
    context_angles = drafter.rotary.cos_sin(torch.arange(context_len))
    block_angles = drafter.rotary.cos_sin(torch.arange(context_len, context_len + width))
    hidden = drafter.embed(sequences.batch((2,)).token_ids)
    for layer in drafter.layers:
        assert isinstance(layer, DrafterLayer)
        q, k, v = layer.block_inputs(hidden, *block_angles)
        context = layer.self_attn.context_kv(features, *context_angles)
        keys, values = torch.cat((context.k, k)), torch.cat((context.v, v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True
        ).transpose(0, 1)
        hidden = layer.finish(hidden, attended)
    hidden = drafter.norm(hidden).normed
    torch.testing.assert_close(hidden.detach(), served.hidden[0], atol=ATOL, rtol=1e-5)
    loss = torch.nn.functional.cross_entropy(drafter.draft_logits(hidden[1:]), torch.tensor([1, 2, 3]))
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in drafter.named_parameters():
        if not name.startswith("length_head"):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
