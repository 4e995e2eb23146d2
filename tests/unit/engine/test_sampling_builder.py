# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
import time

import pytest
import torch

from adaflash.engine.sampling import MIN_TEMPERATURE, SamplingBuilder
from adaflash.ops.filters import adjusted_logits
from adaflash.request import SamplingParams

VOCAB_SIZE = 50
EOS = 2


def builder_of(*params, draft_top_k=None):
    builder = SamplingBuilder(VOCAB_SIZE, draft_top_k=draft_top_k)
    for key, one in enumerate(params):
        builder.add(key, [1, 2, 3], one, seed=100 + key, sample_index=key % 3, eos_ids=[EOS])
    return builder


def anchor_rows(builder, *seq_keys):
    """Rows of plain decoding, each at output index 0."""
    return builder.verify_rows(seq_keys, [0] * len(seq_keys), [0] * len(seq_keys), [[]] * len(seq_keys))


def biases(metadata):
    if metadata.bias is None:
        return []
    return sorted(zip(*(column.tolist() for column in metadata.bias), strict=True))


def test_rows_carry_their_sequences_constants():
    first = SamplingParams(temperature=0.5, top_k=-1, top_p=0.9)
    second = SamplingParams(temperature=1.5, top_k=7, min_p=0.1)
    rows = builder_of(first, second).verify_rows([1, 0], [4, 9], [1, 0], [[8], []])
    assert not rows.all_greedy
    assert rows.temperature.tolist() == [1.5, 1.5, 0.5]
    assert rows.top_k.tolist() == [7, 7, 0]
    assert rows.top_p.tolist() == pytest.approx([1.0, 1.0, 0.9])
    assert rows.min_p.tolist() == pytest.approx([0.1, 0.1, 0.0])
    assert rows.seed.tolist() == [101, 101, 100]
    assert rows.sample_index.tolist() == [1, 1, 0]
    assert rows.output_index.tolist() == [4, 5, 9]
    assert rows.penalties is None
    assert rows.bias is None


def test_unused_features_are_none_and_greedy_rows_use_no_filters():
    rows = anchor_rows(builder_of(SamplingParams(temperature=0, top_k=5, top_p=0.5), SamplingParams()), 0)
    assert rows.all_greedy
    assert rows.top_k is rows.top_p is rows.min_p is None


def test_a_temperature_too_small_to_divide_by_is_greedy():
    builder = builder_of(SamplingParams(temperature=MIN_TEMPERATURE / 2))
    assert anchor_rows(builder, 0).all_greedy


def test_plain_greedy_batches_share_one_metadata():
    builder = builder_of(SamplingParams(temperature=0), SamplingParams(temperature=0))
    assert anchor_rows(builder, 0, 1) is anchor_rows(builder, 0, 1)
    assert builder.verify_rows([0], [0], [1], [[5]]) is anchor_rows(builder, 0, 1)
    builder.add(7, [1], SamplingParams(), 0, 0, [])
    assert not anchor_rows(builder, 7).all_greedy
    builder.remove(7)
    assert anchor_rows(builder, 0, 1) is anchor_rows(builder, 0, 1)


def test_verify_rows_are_those_of_one_step_after_another():
    mixed = [
        SamplingParams(temperature=0),
        SamplingParams(frequency_penalty=1.0, logit_bias={7: 1.0}),
        SamplingParams(top_p=0.5, min_tokens=6, max_tokens=9),
    ]
    builder, drafts, num_drafts = builder_of(*mixed), [[4, 5, 6], [7, 8], []], [2, 2, 0]
    logits = torch.randn(7, VOCAB_SIZE)
    verify = builder.verify_rows([0, 1, 2], [3, 4, 5], num_drafts, drafts)
    adjusted, row = adjusted_logits(logits, verify), 0
    assert biases(verify) == [(3, 7, 1.0), (4, 7, 1.0), (5, 7, 1.0), (6, EOS, float("-inf"))]
    for seq in range(3):
        for k in range(num_drafts[seq] + 1):
            alone = builder.verify_rows([seq], [3 + seq + k], [0], [[]])
            for name in ("temperature", "seed", "sample_index", "output_index"):
                assert torch.equal(getattr(alone, name), getattr(verify, name)[row : row + 1])
            assert torch.equal(adjusted_logits(logits[row : row + 1], alone), adjusted[row : row + 1])
            builder.commit(seq, drafts[seq][k : k + 1])
            row += 1


def test_draft_rows_count_up_from_the_sequences_output_index():
    builder, columns = builder_of(SamplingParams(), SamplingParams(temperature=0.5)), torch.tensor([3, 9, 11])
    rows = builder.draft_rows([1, 0], [10, 20], 3, columns, 9)
    assert rows.output_index.tolist() == [10, 11, 12, 20, 21, 22]
    assert rows.seed.tolist() == [101] * 3 + [100] * 3
    assert rows.column_token_ids is columns
    assert biases(rows) == [(r, 9, float("-inf")) for r in range(6)]
    assert rows.top_k is None


def test_draft_rows_of_greedy_sequences_ban_the_mask_token_only():
    builder = builder_of(SamplingParams(temperature=0))
    assert biases(builder.draft_rows([0], [0], 2, None, 4)) == [(0, 4, float("-inf")), (1, 4, float("-inf"))]
    assert builder.draft_rows([0], [0], 2, None, None).bias is None


def test_drafts_come_from_the_likeliest_tokens_when_told_so():
    sampled, narrow, greedy = SamplingParams(), SamplingParams(top_k=4), SamplingParams(temperature=0)
    builder = builder_of(sampled, narrow, greedy, draft_top_k=16)
    assert builder.draft_rows([0, 1], [0, 0], 1, None, None).top_k.tolist() == [16, 4]
    assert builder.draft_rows([0], [0], 1, None, None).top_k.tolist() == [16]
    assert builder.draft_rows([2], [0], 1, None, None).top_k is None
    assert anchor_rows(builder, 0).top_k is None


# ---- penalties ---------------------------------------------------------------------------------------------------


def test_committed_tokens_are_counted_for_sequences_with_penalties_alone():
    builder = builder_of(SamplingParams(), SamplingParams(presence_penalty=1.0))
    builder.commit(0, [5, 6])
    builder.commit(1, [5, 6])
    builder.commit(1, [5])
    penalties = builder.verify_rows([0, 1], [2, 1], [0, 2], [[], [9, 9]]).penalties
    assert penalties.slot[0] == -1
    counts = penalties.output_counts[penalties.slot[1]]
    assert {token: int(n) for token, n in enumerate(counts) if n} == {5: 2, 6: 1}
    assert penalties.prompt_mask[penalties.slot[1]].nonzero()[:, 0].tolist() == [1, 2, 3]
    assert penalties.draft_prefix.tolist() == [[-1, -1], [-1, -1], [9, -1], [9, 9]]


def test_a_reused_slot_starts_clean():
    builder, params = SamplingBuilder(VOCAB_SIZE), SamplingParams(frequency_penalty=0.5)
    builder.add(1, [4], params, 0, 0, [])
    builder.commit(1, [7, 7])
    builder.remove(1)
    builder.add(2, [5], params, 0, 0, [])
    penalties = anchor_rows(builder, 2).penalties
    slot = int(penalties.slot[0])
    assert penalties.output_counts[slot].sum() == 0
    assert penalties.prompt_mask[slot].nonzero()[:, 0].tolist() == [5]


def test_slots_and_seats_survive_random_arrivals_and_departures():
    builder, rng, outputs = SamplingBuilder(VOCAB_SIZE), random.Random(0), {}
    for key in range(300):
        penalty = rng.choice([0.0, 0.5])
        builder.add(key, [key % VOCAB_SIZE], SamplingParams(frequency_penalty=penalty), key, 0, [EOS])
        outputs[key] = ([], penalty)
        for other in rng.sample(sorted(outputs), min(3, len(outputs))):
            tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4))]
            builder.commit(other, tokens)
            outputs[other][0].extend(tokens)
        if len(outputs) > rng.randrange(30):
            gone = rng.choice(sorted(outputs))
            builder.remove(gone)
            del outputs[gone]
        if not outputs:
            continue
        rows = anchor_rows(builder, *outputs)
        assert rows.seed.tolist() == list(outputs)
        for row, (tokens, has_penalty) in enumerate(outputs.values()):
            slot = -1 if rows.penalties is None else int(rows.penalties.slot[row])
            assert (slot >= 0) == bool(has_penalty)
            if slot >= 0:
                expected = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=VOCAB_SIZE)
                assert torch.equal(rows.penalties.output_counts[slot].long(), expected)


# ---- bias --------------------------------------------------------------------------------------------------------


def test_stop_ids_are_banned_until_min_tokens():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[9], logit_bias={5: -3.0, EOS: 1.0})
    rows = builder_of(params).verify_rows([0], [0], [2], [[8, 8]])
    always, banned = [(5, -3.0), (EOS, 1.0)], [(9, float("-inf")), (EOS, float("-inf"))]
    expected = [(row, *entry) for row in range(3) for entry in always + (banned if row < 2 else [])]
    assert biases(rows) == sorted(expected)
    logits = adjusted_logits(torch.zeros(3, VOCAB_SIZE), rows)
    assert logits[:, EOS].tolist() == [float("-inf"), float("-inf"), 1.0]


def test_end_of_sequence_is_not_banned_when_ignored():
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert anchor_rows(builder_of(params), 0).bias is None


def test_a_step_of_128_sequences_with_8_rows_costs_less_than_a_few_milliseconds():
    builder = builder_of(*[SamplingParams(temperature=0.7, top_p=0.9, min_tokens=9)] * 128)
    keys, drafts = list(range(128)), [[1, 2, 3, 4, 5, 6, 7]] * 128
    seconds = []
    for _ in range(20):
        start = time.thread_time()
        builder.verify_rows(keys, [5] * 128, [7] * 128, drafts)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 5e-3  # about 0.4 ms; the limit leaves room for slow machines


def test_registering_a_sequence_twice_is_refused():
    with pytest.raises(AssertionError, match="already registered"):
        builder_of(SamplingParams()).add(0, [1], SamplingParams(), 0, 0, [])
