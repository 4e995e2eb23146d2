# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from adaflash.ops.metadata import SamplingMetadata, VerifyMetadata
from adaflash.ops.reference_sampling import _accept_matches, largest_logits, row_logprobs, sample, verify_drafts
from tests.toy_speculation import Filters


def test_row_logprobs_are_those_of_log_softmax_in_fp32():
    logits = (3 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0))).bfloat16()
    tokens = torch.tensor([0, 7, 9, 11, 13, 49])
    out = row_logprobs(logits, tokens, 5)
    expected = logits.float().log_softmax(-1)
    torch.testing.assert_close(out.logprobs, expected[torch.arange(6), tokens])
    torch.testing.assert_close(out.top_logprobs, expected.sort(-1, descending=True).values[:, :5])
    torch.testing.assert_close(expected.gather(-1, out.top_token_ids), out.top_logprobs)


def test_ranks_count_the_more_likely_tokens_and_ties_list_the_lower_id_first():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0]])
    ranks = [row_logprobs(logits, torch.tensor([token]), 3).ranks.item() for token in range(5)]
    assert ranks == [4, 1, 3, 1, 5]
    assert row_logprobs(logits, torch.tensor([0]), 3).top_token_ids.tolist() == [[1, 3, 2]]


def test_no_top_tokens_are_reported_when_none_are_wanted():
    out = row_logprobs(torch.randn(2, 9), torch.tensor([1, 2]), 0)
    assert out.top_token_ids.shape == out.top_logprobs.shape == (2, 0)


def test_corrupted_rows_are_those_without_a_finite_maximum():
    logits = torch.zeros(5, 10)
    logits[0, 3], logits[1, 3], logits[2, 3] = float("nan"), float("inf"), float("-inf")
    logits[3] = float("-inf")
    assert (~largest_logits(logits).isfinite()).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [60, 3000])
def test_corrupted_rows_yield_a_column_and_leave_the_others_alone(temperature, vocab_size):
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(5)
    clean = sample(logits, Filters(temperature, top_p=0.9).rows(rows, rows))
    logits[0, 30], logits[1, 31] = float("nan"), float("inf")
    logits[2] = float("-inf")
    tokens = sample(logits, Filters(temperature, top_p=0.9).rows(rows, rows))
    assert torch.equal(tokens[3:], clean[3:])
    assert bool(((tokens >= 0) & (tokens < vocab_size)).all())


def test_no_rows_give_no_tokens():
    empty = torch.empty(0, dtype=torch.int64)
    assert sample(torch.empty(0, 40), Filters().rows(empty, empty)).shape == (0,)
    assert sample(torch.empty(0, 40), SamplingMetadata.greedy(0)).shape == (0,)


def test_equal_distributions_accept_every_draft():
    count, vocab_size = 2000, 6
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)).expand(count, -1)
    seed, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    drafts = sample(logits, Filters().rows(seed, zero))[:, None]
    rows = Filters().rows(seed.repeat_interleave(2), torch.tensor([0, 1]).repeat(count))
    meta = VerifyMetadata(torch.arange(count + 1) * 2, [1] * count)
    target = logits.repeat_interleave(2, dim=0)
    for draft_logits in (None, logits[:, None]):
        assert verify_drafts(target, drafts, draft_logits, meta, rows, None, sample).num_accepted.sum() == count


def test_the_path_without_synchronisation_accepts_what_the_waves_accept():
    num_drafts, vocab_size, generator = [3, 0, 2, 5, 1], 4, torch.Generator().manual_seed(0)
    cu_rows = torch.tensor([0, 4, 5, 8, 14, 16])
    for seed in range(40):
        logits = torch.randn(16, vocab_size, generator=generator)
        drafts = torch.randint(vocab_size, (5, 5), generator=generator)
        rows, meta = Filters().rows(torch.full((16,), seed), torch.arange(16)), VerifyMetadata(cu_rows, num_drafts)
        waves = verify_drafts(logits, drafts, None, meta, rows, None, sample)
        matched = _accept_matches(sample(logits, rows), drafts, meta)
        assert torch.equal(waves.token_ids, matched.token_ids)
        assert torch.equal(waves.num_accepted, matched.num_accepted)
