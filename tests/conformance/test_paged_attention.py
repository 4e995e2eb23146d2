# SPDX-License-Identifier: Apache-2.0
"""`paged_attention` against the reference, and the reference against a per-query loop over dense keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

GQA_RATIOS = (1, 2, 3, 4, 5, 6, 7, 8)


def boundary_offsets(block_size):
    """0 .. 2 blocks; of long blocks those near a boundary."""
    return [n for n in range(2 * block_size + 1) if block_size <= 16 or min(n % block_size, -n % block_size) <= 8]


def dense_attention(case, causal, window):
    """Attend every query of a case alone: the keys it may see are sliced, so that no mask is involved."""
    rows, outputs = case.q.split([*case.query_lens, len(case.q) - case.num_queries])[:-1], []
    group = case.heads.num_q_heads // case.heads.num_kv_heads
    for queries, keys, values in zip(rows, case.keys, case.values, strict=True):
        for i, query in enumerate(queries):
            position = len(keys) - len(queries) + i
            end = position + 1 if causal else len(keys)
            start = 0 if window is None else max(position - window + 1, 0)
            k, v = (x[start:end].double().transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
            outputs.append(F.scaled_dot_product_attention(query.double()[:, None], k, v)[:, 0].to(query.dtype))
    return torch.stack(outputs) if outputs else case.q[:0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("lengths", [([1], [1]), ([3], [3]), ([4, 1, 7], [20, 33, 7]), ([0, 5, 0, 2], [9, 50, 0, 2])])
def test_reference_matches_a_loop_over_queries(lengths, window, causal, dtype, reference, paged_case, assert_close):
    case = paged_case(*lengths, dtype=dtype)
    assert_close(case.attend(reference, causal, window).cpu(), dense_attention(case, causal, window))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ratio", GQA_RATIOS)
def test_every_gqa_ratio(ratio, head_dim, causal, dtype, backend, reference, paged_case, heads, assert_close):
    shape = heads(2 * ratio, 2, head_dim=head_dim)
    case = paged_case([1, 4, 1, 9], [17, 40, 5, 9], heads=shape, dtype=dtype)
    assert_close(case.attend(backend, causal), case.attend(reference, causal))


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("query_len", [1, 2, 8, 16])
def test_block_boundary_at_every_offset(query_len, shuffled, backend, reference, paged_case, assert_close):
    for offset in boundary_offsets(backend.preferred_block_size):
        case = paged_case([query_len], [query_len + offset], shuffled=shuffled, seed=offset)
        assert_close(case.attend(backend), case.attend(reference))


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 64, 127, 300])
@pytest.mark.parametrize("context", [0, 1, 31, 700])
def test_prefill_and_chunked_prefill(num_tokens, context, dtype, backend, reference, paged_case, assert_close):
    case = paged_case([num_tokens], [num_tokens + context], dtype=dtype)
    assert_close(case.attend(backend), case.attend(reference))


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("num_seqs", [1, 8, 33])
@pytest.mark.parametrize("query_len", [1, 8])
def test_decode_and_draft_blocks(query_len, num_seqs, shuffled, dtype, backend, reference, paged_case, assert_close):
    seq_lens = [query_len + (37 * i) % 420 for i in range(num_seqs)]
    case = paged_case([query_len] * num_seqs, seq_lens, dtype=dtype, shuffled=shuffled)
    for causal in (True, False):
        assert_close(case.attend(backend, causal), case.attend(reference, causal))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 100])
def test_window_hides_older_keys(window, dtype, backend, reference, paged_case, assert_close):
    case = paged_case([1, 8, 40, 3], [500, 33, 40, 16], dtype=dtype)
    for causal in (True, False):
        assert_close(case.attend(backend, causal, window), case.attend(reference, causal, window))


@pytest.mark.parametrize("lengths", [([], []), ([0], [0]), ([0, 0], [5, 0]), ([0, 1, 0, 0, 4], [20, 1, 0, 3, 4])])
def test_sequences_without_queries_write_no_rows(lengths, backend, reference, paged_case, assert_close):
    case = paged_case(*lengths)
    assert_close(case.attend(backend), case.attend(reference))


def test_padding_rows_leave_the_packed_rows_alone(backend, reference, paged_case, assert_close):
    for query_lens, seq_lens in (([1, 1], [5, 30]), ([4], [600]), ([0, 2], [0, 9])):
        case = paged_case(query_lens, seq_lens, padding_rows=5)
        assert_close(case.attend(backend), case.attend(reference))


def test_sequences_may_share_blocks(backend, reference, paged_case, assert_close):
    case = paged_case([1, 1], [16, 16])
    case.block_tables[1][:] = case.block_tables[0]
    case.keys[1], case.values[1] = case.keys[0], case.values[0]
    assert_close(case.attend(backend), case.attend(reference))


def test_one_metadata_serves_layers_and_masks_of_every_kind(backend, reference, paged_case, assert_close):
    case, other = paged_case([1, 4], [30, 12]), paged_case([1, 4], [30, 12], seed=1)
    other.block_tables[:] = case.block_tables
    meta = backend.attention_metadata(case.batch(backend.device))
    for causal, window in ((True, None), (False, None), (True, 7)):
        for layer in (case, other):
            k_cache, v_cache = layer.caches(backend)
            q = layer.q.to(backend.device)
            scale = layer.heads.head_dim**-0.5
            actual = backend.paged_attention(q, k_cache, v_cache, meta, scale, causal, window)
            assert_close(actual, layer.attend(reference, causal, window))


@pytest.mark.parametrize("lengths", [([1], [600]), ([1, 4], [20, 40])])
def test_caches_may_be_slices_of_one_allocation(lengths, backend, reference, paged_case, assert_close):
    case = paged_case(*lengths, shuffled=False)
    pool = torch.stack(case.caches(backend))
    meta = backend.attention_metadata(case.batch(backend.device))
    scale = case.heads.head_dim**-0.5
    assert_close(backend.paged_attention(case.q.to(backend.device), *pool, meta, scale, True), case.attend(reference))


def test_scale_multiplies_the_scores(backend, reference, paged_case, assert_close):
    case = paged_case([1, 3], [20, 40])
    outputs = []
    for each in (backend, reference):
        k_cache, v_cache = case.caches(each)
        meta = each.attention_metadata(case.batch(each.device))
        outputs.append(each.paged_attention(case.q.to(each.device), k_cache, v_cache, meta, 0.5, True))
    assert_close(*outputs)


def test_block_tables_longer_than_the_sequence_are_cut(backend, reference, paged_case, assert_close):
    case = paged_case([1, 1], [10, 500], shuffled=False)
    expected = case.attend(reference)
    spare = [b for b in range(case.num_blocks) if all(b not in table for table in case.block_tables)]
    for table in case.block_tables:
        table.append(spare.pop())
    assert_close(case.attend(backend), expected)


@st.composite
def ragged_lengths(draw):
    """Query and sequence lengths of up to 8 sequences, 300 queries and 900 keys each."""
    query_len = st.one_of(st.just(0), st.just(1), st.integers(0, 16), st.integers(0, 300))
    context = st.one_of(st.integers(0, 40), st.integers(0, 600))
    pairs = draw(st.lists(st.tuples(query_len, context), min_size=1, max_size=8))
    return [q for q, _ in pairs], [q + c for q, c in pairs]


@settings(max_examples=60, deadline=None)
@given(
    lengths=ragged_lengths(),
    num_kv_heads=st.integers(1, 3),
    ratio=st.integers(1, 8),
    which_block_size=st.integers(0, 2),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 64)),
    shuffled=st.booleans(),
    padding_rows=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_ragged_batches(
    backend,
    reference,
    paged_case,
    heads,
    block_sizes,
    assert_close,
    lengths,
    num_kv_heads,
    ratio,
    which_block_size,
    causal,
    window,
    shuffled,
    padding_rows,
    seed,
):
    shape = heads(num_kv_heads * ratio, num_kv_heads)
    block_size = block_sizes[which_block_size % len(block_sizes)]
    case = paged_case(
        *lengths, heads=shape, block_size=block_size, shuffled=shuffled, padding_rows=padding_rows, seed=seed
    )
    assert_close(case.attend(backend, causal, window), case.attend(reference, causal, window))
