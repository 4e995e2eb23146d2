# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from adaflash.ops.filters import adjusted_logits, filtered_scores, select_rows
from adaflash.ops.metadata import PenaltyMetadata, SamplingMetadata, SparseBias
from tests.toy_speculation import Filters

VOCAB_SIZE = 101


def random_logits(num_rows, vocab_size=VOCAB_SIZE, seed=0, scale=3.0):
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def filtered(logits, filters):
    rows = torch.zeros(logits.shape[0], dtype=torch.int64)
    return filtered_scores(logits, filters.rows(rows, rows))


@settings(max_examples=150, deadline=None)
@given(
    st.floats(0.05, 5.0),
    st.integers(0, 120),
    # Between the two, the tokens cut weigh less than the rounding of a sum in fp32.
    st.floats(0.01, 0.999) | st.just(1.0),
    # Below, probabilities in fp32 are 0 where their logarithms are finite: transformers cuts what min_p would keep.
    st.just(0.0) | st.floats(1e-30, 1.0),
    st.integers(0, 10**6),
)
def test_filters_keep_what_transformers_keeps(temperature, top_k, top_p, min_p, seed):
    logits = random_logits(3, seed=seed)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(3, 1, dtype=torch.int64), logits)
    out = filtered(logits, Filters(temperature, top_k, top_p, min_p))
    # which side of the nucleus its last token falls on is open when the mass before it is top_p up to rounding
    differs = (out.isinf() != expected.isinf()).sum(-1)
    largest = expected.amax(-1, keepdim=True)
    kept, expected_kept = ((scores - largest).exp().sum(-1) for scores in (out, expected))
    mass = (kept - expected_kept).abs() / expected_kept
    assert bool(((differs == 0) | ((differs == 1) & (mass < 1e-5))).all())
    both = out.isfinite() & expected.isfinite()
    torch.testing.assert_close(out[both], expected[both])


@pytest.mark.parametrize("vocab_size", [7, 1025, 5000])
@pytest.mark.parametrize("scale", [0.01, 2.0])
@pytest.mark.parametrize("filters", [Filters(top_p=0.9), Filters(0.7, 900, 0.99), Filters(2.0, 3, 0.5, 0.2)])
def test_filtered_softmax_equals_the_definition(vocab_size, scale, filters):
    logits = random_logits(2, vocab_size, scale=scale)
    probs = filtered(logits, filters).double().softmax(-1)
    for row, expected in zip(probs, logits, strict=True):
        wanted = torch.from_numpy(filters.probs(expected.double().numpy()))
        assert (row - wanted).abs().sum() < 2e-3 / vocab_size + 1e-5


def test_tokens_tied_with_the_last_one_kept_are_kept():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -1.0]])
    assert filtered(logits, Filters(top_k=2)).isfinite().tolist() == [[False, True, True, True, True, False]]
    assert filtered(logits, Filters(top_p=0.5)).isfinite().tolist() == [[False, True, True, True, True, False]]


def test_filters_leave_at_least_the_likeliest_token():
    logits = random_logits(4)
    for filters in (Filters(top_p=1e-9), Filters(min_p=1.0), Filters(top_k=1)):
        assert torch.equal(filtered(logits, filters).isfinite().nonzero()[:, 1], logits.argmax(-1))


def test_greedy_rows_are_not_filtered():
    logits, rows = random_logits(2), Filters(top_k=1, top_p=0.1, min_p=0.9).rows(*[torch.arange(2)] * 2)
    rows.temperature[0] = 0
    out = filtered_scores(logits, rows)
    assert torch.equal(out[0], logits[0])
    assert out[1].isfinite().sum() == 1


# ---- penalties and bias ------------------------------------------------------------------------------------------


def penalised_rows(slot, counts, prompt_mask, prefix, repetition, presence, frequency, column_token_ids=None):
    rows = torch.arange(len(slot))
    penalties = PenaltyMetadata(
        torch.tensor(slot),
        counts,
        prompt_mask,
        torch.tensor(prefix),
        *(torch.tensor(values) for values in (repetition, presence, frequency)),
    )
    metadata = Filters().rows(rows, rows, column_token_ids)
    return SamplingMetadata(**{**metadata.__dict__, "penalties": penalties})


def state(prompts, outputs, vocab_size=VOCAB_SIZE):
    counts = torch.stack([torch.bincount(torch.tensor(ids), minlength=vocab_size) for ids in outputs]).int()
    mask = torch.stack([torch.bincount(torch.tensor(ids), minlength=vocab_size) for ids in prompts]).bool()
    return counts, mask


def test_penalties_follow_the_definition_with_draft_prefixes():
    logits = random_logits(3)
    prompts, outputs = [[1, 2, 3], [4, 4]], [[5, 5, 6], [7]]
    prefix = [[8, 5, -1], [-1, -1, -1], [9, -1, -1]]
    slot, repetition, presence, frequency = [0, -1, 1], [1.5, 2.0, 0.7], [0.4, 9.0, -0.5], [0.3, 9.0, 0.2]
    rows = penalised_rows(slot, *state(prompts, outputs), prefix, repetition, presence, frequency)
    out = adjusted_logits(logits, rows)
    for r in range(3):
        expected = logits[r].clone()
        if slot[r] >= 0:
            output = outputs[slot[r]] + [token for token in prefix[r] if token >= 0]
            for token in {*prompts[slot[r]], *output}:
                value = float(expected[token])
                expected[token] = value / repetition[r] if value > 0 else value * repetition[r]
            for token in set(output):
                expected[token] -= frequency[r] * output.count(token) + presence[r]
        torch.testing.assert_close(out[r], expected)
    assert rows.penalties.output_counts[0, 8] == 0, "the state is not written"


def test_repetition_penalty_equals_transformers():
    logits, prompt, output, prefix = random_logits(1), [1, 2, 3, 3], [50, 60], [70, 2]
    rows = penalised_rows([0], *state([prompt], [output]), [prefix], [1.3], [0.0], [0.0])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output + prefix]), logits)
    torch.testing.assert_close(adjusted_logits(logits, rows), expected)


def test_penalties_and_bias_of_a_reduced_vocabulary_use_target_ids():
    columns = torch.tensor([70, 5, 99, 3])
    logits = random_logits(1)
    full = penalised_rows([0], *state([[3]], [[5, 5]]), [[99]], [1.5], [0.5], [0.25])
    bias = SparseBias(torch.tensor([0, 0, 0]), torch.tensor([70, 71, 3]), torch.tensor([2.0, 3.0, float("-inf")]))
    full = SamplingMetadata(**{**full.__dict__, "bias": bias})
    reduced = SamplingMetadata(**{**full.__dict__, "column_token_ids": columns})
    assert torch.equal(adjusted_logits(logits[:, columns], reduced), adjusted_logits(logits, full)[:, columns])


def test_biases_of_one_token_add_up_and_the_logits_are_not_written():
    logits = random_logits(2)
    before = logits.clone()
    bias = SparseBias(torch.tensor([1, 1, 0]), torch.tensor([4, 4, 9]), torch.tensor([1.0, 2.0, float("-inf")]))
    out = adjusted_logits(logits, SamplingMetadata(**{**SamplingMetadata.greedy(2).__dict__, "bias": bias}))
    assert out[1, 4] == before[1, 4] + 3.0
    assert out[0, 9] == float("-inf")
    assert (out != before).sum() == 2
    assert torch.equal(logits, before)


def test_logits_without_penalties_and_bias_are_not_copied():
    logits = random_logits(2)
    assert adjusted_logits(logits, SamplingMetadata.greedy(2)) is logits


def test_selected_rows_keep_their_own_biases():
    bias = SparseBias(torch.tensor([0, 2, 2, 1]), torch.tensor([10, 11, 12, 13]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    metadata = SamplingMetadata(**{**SamplingMetadata.greedy(3).__dict__, "bias": bias})
    picked = select_rows(metadata, torch.tensor([2, 0])).bias
    assert sorted(zip(picked.rows.tolist(), picked.token_ids.tolist(), picked.values.tolist(), strict=True)) == [
        (0, 11, 2.0),
        (0, 12, 3.0),
        (1, 10, 1.0),
    ]
