# SPDX-License-Identifier: Apache-2.0
"""`sample` and `verify_drafts` of every backend: against the reference, and against the laws they must follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from adaflash.ops.metadata import PenaltyMetadata, SamplingMetadata, SparseBias, VerifyMetadata
from tests.toy_speculation import (
    NUM_TOKENS,
    Filters,
    ToyModel,
    confident_prefix,
    everything,
    likely_prefix,
    p_value,
    pair_counts,
)

ALPHA = 1e-3
NUM_GENERATIONS = 20_000
FILTERS = {
    "plain": Filters(),
    "temperature": Filters(0.7),
    "top_k": Filters(1.3, top_k=5),
    "top_p": Filters(top_p=0.8),
    "all": Filters(0.9, top_k=6, top_p=0.9, min_p=0.1),
}
COLUMNS = {"full": None, "reduced": [6, 1, 3, 4, 0]}


@pytest.fixture(params=FILTERS.values(), ids=FILTERS.keys())
def filters(request):
    return request.param


@pytest.fixture(params=COLUMNS.values(), ids=COLUMNS.keys())
def columns(request):
    return request.param


def random_logits(backend, num_rows, num_columns, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(num_rows, num_columns, generator=generator)).to(backend.device)


def mixed_rows(backend, num_rows, vocab_size, seed=0):
    """Rows that use everything at once: greedy and sampled, filters, penalties with prefixes, bias."""
    generator = torch.Generator().manual_seed(seed)
    device = backend.device

    def pick(*values, dtype=torch.float32):
        index = torch.randint(len(values), (num_rows,), generator=generator)
        return torch.tensor(values, dtype=dtype)[index].to(device)

    def integers(high, *shape):
        return torch.randint(high, shape, generator=generator).to(device)

    prefix = integers(vocab_size + 20, num_rows, 3)
    penalties = PenaltyMetadata(
        slot=pick(-1, 0, 1, 2, dtype=torch.int64),
        output_counts=integers(3, 3, vocab_size).int() * integers(2, 3, vocab_size).int(),
        prompt_mask=integers(2, 3, vocab_size).bool(),
        draft_prefix=torch.where(prefix < vocab_size, prefix, -1),
        repetition=pick(1.0, 1.3, 0.8),
        presence=pick(0.0, 0.5, -0.4),
        frequency=pick(0.0, 0.2, -0.3),
    )
    bias_values = torch.cat([torch.full((num_rows,), float("-inf")), torch.linspace(-4, 4, 2 * num_rows)]).to(device)
    bias = SparseBias(integers(num_rows, 3 * num_rows), integers(vocab_size, 3 * num_rows), bias_values)
    return SamplingMetadata(
        all_greedy=False,
        temperature=pick(0.0, 0.3, 1.0, 1.5),
        top_k=pick(0, 1, 5, 40, 10**6, dtype=torch.int32),
        top_p=pick(1.0, 0.9, 0.5, 1e-6),
        min_p=pick(0.0, 0.02, 1.0),
        seed=integers(2**62, num_rows),
        sample_index=integers(128, num_rows),
        output_index=integers(5000, num_rows),
        penalties=penalties,
        bias=bias,
    )


@pytest.mark.parametrize("vocab_size", [5, 97, 3001])
def test_sample_equals_the_reference(backend, reference, vocab_size):
    logits = random_logits(backend, 64, vocab_size)
    rows = mixed_rows(backend, 64, vocab_size)
    assert torch.equal(backend.sample(logits, rows), reference.sample(logits, rows))


@pytest.mark.parametrize("vocab_size", [97, 3001])
def test_a_reduced_vocabulary_draws_what_the_full_one_draws_with_the_rest_banned(backend, vocab_size):
    generator = torch.Generator().manual_seed(1)
    kept = torch.randperm(vocab_size, generator=generator)[: vocab_size // 2].to(backend.device)
    logits, rows = random_logits(backend, 32, vocab_size), mixed_rows(backend, 32, vocab_size)
    only_kept = torch.full_like(logits, float("-inf")).index_copy(1, kept, logits[:, kept])
    expected = backend.sample(only_kept, rows)
    columns = backend.sample(logits[:, kept].contiguous(), replace(rows, column_token_ids=kept))
    assert torch.equal(kept[columns], expected)


def test_greedy_takes_the_lowest_index_on_ties_and_ignores_filters(backend):
    logits = torch.zeros(2, 50, device=backend.device)
    logits[1, [7, 9]] = 1.0
    rows = SamplingMetadata.greedy(2, backend.device)
    assert backend.sample(logits, rows).tolist() == [0, 7]
    half = replace(rows, all_greedy=False, temperature=torch.tensor([0.0, 1.0], device=backend.device))
    assert backend.sample(logits, replace(half, top_p=torch.full_like(half.temperature, 0.1)))[0] == 0


@pytest.mark.parametrize("vocab_size", [64, 4099])
def test_a_row_does_not_depend_on_the_rest_of_the_batch(backend, vocab_size):
    logits, rows = random_logits(backend, 48, vocab_size), mixed_rows(backend, 48, vocab_size)
    together = backend.sample(logits, rows)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3)).to(backend.device)
    for picked in (order, order[:7], *order[:12].split(1)):
        assert torch.equal(backend.sample(logits[picked], select(rows, picked)), together[picked])


def select(rows, picked):
    """Rows of the metadata, by another way than the reference's."""
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "output_index")
    places = {int(row): place for place, row in enumerate(picked)}
    entries = [i for i, row in enumerate(rows.bias.rows.tolist()) if row in places]
    new_rows = [places[int(rows.bias.rows[i])] for i in entries]
    bias = SparseBias(
        torch.tensor(new_rows, dtype=torch.int64, device=picked.device),
        rows.bias.token_ids[entries],
        rows.bias.values[entries],
    )
    per_row = ("slot", "draft_prefix", "repetition", "presence", "frequency")
    penalties = replace(rows.penalties, **{name: getattr(rows.penalties, name)[picked] for name in per_row})
    return replace(rows, penalties=penalties, bias=bias, **{name: getattr(rows, name)[picked] for name in fields})


def test_samples_follow_the_filtered_softmax(backend, filters):
    logits = random_logits(backend, 1, 40, seed=5, scale=1.5)
    seed = torch.arange(NUM_GENERATIONS, device=backend.device)
    tokens = backend.sample(logits.expand(NUM_GENERATIONS, -1), filters.rows(seed, seed % 11))
    counts = np.bincount(tokens.cpu().numpy(), minlength=40)
    assert p_value(counts, filters.probs(logits[0].cpu().double().numpy())) > ALPHA


def test_samples_of_output_indexes_of_one_seed_are_independent(backend):
    logits = random_logits(backend, 1, 8, seed=6, scale=1.0)
    index = torch.arange(NUM_GENERATIONS, device=backend.device)
    tokens = backend.sample(logits.expand(NUM_GENERATIONS, -1), Filters().rows(torch.full_like(index, 9), index))
    pairs = np.bincount((tokens[:-1] * 8 + tokens[1:]).cpu().numpy(), minlength=64)
    probs = Filters().probs(logits[0].cpu().double().numpy())
    assert p_value(pairs, np.outer(probs, probs)) > ALPHA


# ---- speculation -------------------------------------------------------------------------------------------------


def seeds_of(backend, count):
    return torch.arange(count, device=backend.device) * 7919 + 2**33


@pytest.mark.parametrize("verify_rule", [everything, confident_prefix, likely_prefix])
def test_coupled_tokens_are_those_of_plain_decoding(backend, filters, columns, verify_rule):
    toy, seeds = ToyModel(backend.device, columns), seeds_of(backend, 500)
    speculated = toy.generate(backend, seeds, filters, False, verify_rule)
    plain = toy.generate(backend, seeds, filters, False, lambda q, drafts: q.new_zeros(q.shape[0], dtype=torch.int64))
    assert torch.equal(speculated.tokens, plain.tokens)
    assert plain.num_rounds == 500 * NUM_TOKENS
    assert speculated.num_accepted > 0
    assert speculated.num_rounds < plain.num_rounds


@pytest.mark.parametrize("verify_rule", [everything, confident_prefix])
def test_rejection_follows_the_target_over_rounds(backend, filters, columns, verify_rule):
    toy = ToyModel(backend.device, columns)
    out = toy.generate(backend, seeds_of(backend, NUM_GENERATIONS), filters, True, verify_rule)
    assert p_value(pair_counts(out.tokens), toy.exact_pairs(filters)) > ALPHA
    assert 0 < out.num_accepted < out.num_verified


def test_the_law_test_finds_drafts_dropped_for_their_own_probability(backend, filters, columns):
    toy = ToyModel(backend.device, columns)
    out = toy.generate(backend, seeds_of(backend, NUM_GENERATIONS), filters, True, likely_prefix)
    assert p_value(pair_counts(out.tokens), toy.exact_pairs(filters)) < ALPHA


def test_the_law_test_finds_a_bias_of_two_per_cent(backend, filters):
    toy = ToyModel(backend.device)
    out = toy.generate(backend, seeds_of(backend, NUM_GENERATIONS), filters, True, everything)
    exact, counts = toy.exact_pairs(filters), pair_counts(out.tokens)
    favoured = int(np.argmin(np.where(exact >= 0.01, exact, 1)))
    moved = np.random.default_rng(0).binomial(counts.ravel(), 0.02 / (1 - exact.ravel()[favoured]))
    biased = counts.ravel() - moved
    biased[favoured] += moved.sum()
    assert p_value(biased, exact) < ALPHA


def test_rejection_accepts_more_than_coupling(backend):
    toy, seeds = ToyModel(backend.device), seeds_of(backend, 4000)
    accepted = [toy.generate(backend, seeds, Filters(), rejection, everything).num_accepted for rejection in (0, 1)]
    assert accepted[1] > accepted[0] > 0


@pytest.mark.parametrize("rejection", [False, True], ids=["gumbel", "rejection"])
def test_verify_equals_the_reference_on_ragged_batches(backend, reference, rejection):
    vocab_size, num_drafts = 97, [3, 0, 5, 1, 0, 5]
    num_rows, width = sum(num_drafts) + len(num_drafts), 5
    rows = mixed_rows(backend, num_rows, vocab_size)
    rows = replace(rows, temperature=torch.where(rows.temperature > 0, rows.temperature, 0.5))
    target = random_logits(backend, num_rows, vocab_size)
    draft_logits = random_logits(backend, len(num_drafts) * width, vocab_size, seed=1).view(-1, width, vocab_size)
    drafts = draft_logits.argmax(-1)
    sizes = torch.tensor([0, *num_drafts], device=backend.device) + 1
    meta = VerifyMetadata(sizes.cumsum(0) - 1, num_drafts)
    args = (target, drafts, draft_logits if rejection else None, meta, rows)
    out, expected = backend.verify_drafts(*args), reference.verify_drafts(*args)
    assert torch.equal(out.token_ids, expected.token_ids)
    assert torch.equal(out.num_accepted, expected.num_accepted)
    filled = torch.arange(out.token_ids.shape[1], device=backend.device) <= out.num_accepted[:, None]
    assert torch.equal(out.token_ids >= 0, filled)


@pytest.mark.parametrize("rejection", [False, True], ids=["gumbel", "rejection"])
@pytest.mark.parametrize("wrong_at", [0, 1, 2, None])
def test_greedy_rows_accept_up_to_the_first_mismatch(backend, rejection, wrong_at):
    target = random_logits(backend, 8, 30)
    best = target.argmax(-1)
    drafts = best.view(2, 4)[:, :3].clone()
    if wrong_at is not None:
        drafts[0, wrong_at] = (drafts[0, wrong_at] + 1) % 30
    draft_logits = random_logits(backend, 6, 30, seed=2).view(2, 3, 30) if rejection else None
    rows = SamplingMetadata.greedy(8, backend.device)
    # the second sequence is sampled, so that the greedy one takes the path of a mixed batch
    rows = replace(rows, all_greedy=False, temperature=torch.tensor([0.0] * 4 + [1.0] * 4, device=backend.device))
    meta = VerifyMetadata(torch.tensor([0, 4, 8], device=backend.device), [3, 3])
    out = backend.verify_drafts(target, drafts, draft_logits, meta, rows)
    accepted = 3 if wrong_at is None else wrong_at
    assert out.num_accepted[0] == accepted
    assert out.token_ids[0].tolist() == [*best[: accepted + 1].tolist(), *[-1] * (3 - accepted)]


def test_verified_tokens_do_not_depend_on_the_other_sequences(backend):
    toy, seeds = ToyModel(backend.device), seeds_of(backend, 60)
    for rejection in (False, True):
        together = toy.generate(backend, seeds, Filters(top_p=0.9), rejection, everything).tokens
        apart = [toy.generate(backend, part, Filters(top_p=0.9), rejection, everything) for part in seeds.split(7)]
        assert torch.equal(torch.cat([part.tokens for part in apart]), together)
