# SPDX-License-Identifier: Apache-2.0
"""npu_fused_infer_attention_score against scaled_dot_product_attention with an explicit mask, request by request."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128


class Case(NamedTuple):
    """Packed queries, paged caches [blocks, 128, kv_heads, dim], and the arguments of the operator."""

    query: Tensor
    key: Tensor
    value: Tensor
    arguments: dict[str, Any]


def causal_mask(device: str = "npu") -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.int8, device=device).triu(1)


def make(
    query_lens: list[int], kv_lens: list[int], heads: int = 4, kv_heads: int = 2, dim: int = 128, seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    per_request = [-(-length // BLOCK) for length in kv_lens]
    num_blocks = sum(per_request) + 2
    order = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.zeros(len(kv_lens), max(*per_request, 1), dtype=torch.int32)
    for row, count in enumerate(per_request):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    query = torch.randn(sum(query_lens), heads, dim, generator=generator).bfloat16()
    key, value = torch.randn(2, num_blocks, BLOCK, kv_heads, dim, generator=generator).bfloat16()
    arguments = {
        "actual_seq_lengths": torch.tensor(query_lens).cumsum(0).tolist(),
        "actual_seq_lengths_kv": kv_lens,
        "block_table": table,
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "scale": dim**-0.5,
        "input_layout": "TND",
        "block_size": BLOCK,
    }
    return Case(query, key, value, arguments)


def run(case: Case, **changes: Any) -> Tensor:
    result, _ = call(case, **changes)
    return result.cpu()


def call(case: Case, **changes: Any) -> tuple[Tensor, Tensor]:
    arguments = {**case.arguments, **changes}
    arguments["block_table"] = arguments["block_table"].to("npu")
    query, key, value = (t.to("npu") for t in (case.query, case.key, case.value))
    return torch.ops.npu.npu_fused_infer_attention_score(query, key.flatten(2), value.flatten(2), **arguments)


def reference(case: Case, visible: Any) -> Tensor:
    """SDPA in fp32; `visible(position of the query, position of the key)` on broadcast index tensors."""
    arguments = case.arguments
    parts, start = [], 0
    for row, (end, length) in enumerate(
        zip(arguments["actual_seq_lengths"], arguments["actual_seq_lengths_kv"], strict=True)
    ):
        blocks = arguments["block_table"][row].long()
        k, v = (cache[blocks].flatten(0, 1)[:length].float().transpose(0, 1) for cache in (case.key, case.value))
        q = case.query[start:end].float().transpose(0, 1)
        positions = torch.arange(length - (end - start), length).unsqueeze(1)
        mask = visible(positions, torch.arange(length))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=arguments["scale"], enable_gqa=True)
        parts.append(out.transpose(0, 1))
        start = end
    return torch.cat(parts).bfloat16()


def everything(queries: Tensor, keys: Tensor) -> Tensor:
    return (queries >= -(10**9)) & (keys >= 0)


def causal(queries: Tensor, keys: Tensor) -> Tensor:
    return keys <= queries


request_lens = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 280)), min_size=1, max_size=4)


@given(lens=request_lens, seed=st.integers(0, 99), heads=st.sampled_from([(4, 2), (4, 4), (8, 1)]))
@settings(deadline=None, max_examples=25)
def test_causal_paged_attention_equals_sdpa(lens, seed, heads):
    query_lens = [q for q, _ in lens]
    case = make(query_lens, [q + extra for q, extra in lens], *heads, seed=seed)
    result = run(case, sparse_mode=3, atten_mask=causal_mask())
    torch.testing.assert_close(result, reference(case, causal), rtol=1e-2, atol=4e-3)


def test_without_mask_every_key_is_seen():
    case = make([5, 3, 16], [150, 3, 140])
    torch.testing.assert_close(run(case, sparse_mode=0), reference(case, everything), rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("window", [1, 2, 7, 128, 500])
def test_band_sees_pre_tokens_before_and_next_tokens_after(window):
    case = make([6, 40], [200, 40])

    def band(queries: Tensor, keys: Tensor) -> Tensor:
        return (keys <= queries) & (keys >= queries - window)

    result = run(case, sparse_mode=4, pre_tokens=window, next_tokens=0, atten_mask=causal_mask().bool())
    torch.testing.assert_close(result, reference(case, band), rtol=1e-2, atol=4e-3)


def test_cache_of_four_axes_has_heads_before_tokens():
    case = make([4, 2], [130, 70])
    arguments = {**case.arguments, "block_table": case.arguments["block_table"].to("npu")}
    by_head = [cache.to("npu").transpose(1, 2).contiguous() for cache in (case.key, case.value)]
    result, _ = torch.ops.npu.npu_fused_infer_attention_score(case.query.to("npu"), *by_head, **arguments)
    assert torch.equal(result.cpu(), run(case))


def test_packed_keys_take_cumulative_lengths():
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(5, 4, 128, generator=generator).half()
    key, value = torch.randn(2, 9, 2, 128, generator=generator).half()
    result, _ = torch.ops.npu.npu_fused_infer_attention_score(
        query.to("npu"),
        key.to("npu"),
        value.to("npu"),
        actual_seq_lengths=[2, 5],
        actual_seq_lengths_kv=[6, 9],
        num_heads=4,
        num_key_value_heads=2,
        scale=0.1,
        input_layout="TND",
    )
    for rows, columns in ((slice(0, 2), slice(0, 6)), (slice(2, 5), slice(6, 9))):
        q, k, v = (t.float().transpose(0, 1) for t in (query[rows], key[columns], value[columns]))
        wanted = F.scaled_dot_product_attention(q, k, v, scale=0.1, enable_gqa=True).transpose(0, 1).half()
        torch.testing.assert_close(result[rows].cpu(), wanted, rtol=2e-3, atol=1e-3)


def test_log_sum_exp_is_given_when_asked_for():
    case = make([3], [10])
    result, lse = call(case, softmax_lse_flag=True)
    q = case.query.float()
    k = case.key[case.arguments["block_table"][0, 0].item(), :10].float().repeat_interleave(2, 1)
    wanted = (torch.einsum("qhd,khd->qhk", q, k) * case.arguments["scale"]).logsumexp(-1, keepdim=True)
    assert result.shape == (3, 4, 128)
    torch.testing.assert_close(lse.cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_queries_that_see_no_key_are_zero():
    case = make([4], [2])
    result = run(case, sparse_mode=3, atten_mask=causal_mask())
    assert bool((result[:2] == 0).all())
    assert bool((result[2:] != 0).any())


def test_out_variant_writes_into_its_tensors():
    case = make([3, 2], [9, 4])
    expected = run(case)
    arguments = {**case.arguments, "block_table": case.arguments["block_table"].to("npu")}
    query, key, value = (t.to("npu") for t in (case.query, case.key.flatten(2), case.value.flatten(2)))
    workspace = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace(query, key, value, **arguments)
    out = [torch.empty_like(query), torch.empty(1, dtype=torch.float32, device="npu")]
    torch.ops.npu.npu_fused_infer_attention_score.out(query, key, value, **arguments, workspace=workspace, out=out)
    assert torch.equal(out[0].cpu(), expected)
    with pytest.raises(RuntimeError, match=r"561002.*workspace"):
        torch.ops.npu.npu_fused_infer_attention_score.out(
            query, key, value, **arguments, workspace=workspace[:1000], out=out
        )


REFUSED = {
    "head_dim": (lambda: make([2], [4], dim=64), {}, "head_dim 128"),
    "block_size": (lambda: make([2], [4]), {"block_size": 64}, "block_size must be 128"),
    "block_size_of_the_cache": (
        lambda: Case(*(make([2], [4])._replace(key=torch.zeros(3, 64, 2, 128).bfloat16()))),
        {},
        r"\(blocks, 128",
    ),
    "too_many_heads": (lambda: make([1], [1], heads=512, kv_heads=256), {}, "heads must be 1 to 256"),
    "ratio": (lambda: make([1], [1], heads=65, kv_heads=1), {}, "1 to 64 times"),
    "heads_do_not_divide": (lambda: make([1], [1], heads=4, kv_heads=3), {}, "1 to 64 times"),
    "wrong_num_heads": (lambda: make([1], [1]), {"num_heads": 8}, "num_heads must be 4"),
    "last_is_not_the_number_of_tokens": (
        lambda: make([2, 3], [4, 4]),
        {"actual_seq_lengths": [2, 4]},
        "must be the number of query tokens, 5; got 4",
    ),
    "lengths_not_cumulative": (lambda: make([3, 2], [4, 4]), {"actual_seq_lengths": [6, 5]}, "must be cumulative"),
    "no_lengths": (lambda: make([3], [4]), {"actual_seq_lengths": None}, "TND needs"),
    "as_many_kv_lengths": (lambda: make([3], [4]), {"actual_seq_lengths_kv": [4, 4]}, "must have 1 items"),
    "too_many_requests": (
        lambda: make([1] * 4097, [1] * 4097, heads=1, kv_heads=1),
        {},
        "1 to 4096 requests",
    ),
    "room_of_the_block_table": (lambda: make([3], [100]), {"actual_seq_lengths_kv": [200]}, "room for 128 tokens"),
    "block_table_dtype": (
        lambda: make([3], [100]),
        {"block_table": torch.zeros(1, 1, dtype=torch.int64)},
        "block_table must be int32",
    ),
    "block_table_rows": (
        lambda: make([3], [100]),
        {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
        "block_table must be",
    ),
    "unknown_block": (
        lambda: make([3], [100]),
        {"block_table": torch.full((1, 1), 99, dtype=torch.int32)},
        r"blocks in use must be in \[0, 2\]",
    ),
    "mode": (lambda: make([3], [4]), {"sparse_mode": 7}, "sparse_mode must be 0 to 4"),
    "no_mask": (lambda: make([3], [4]), {"sparse_mode": 3}, "needs the \\(2048, 2048\\) atten_mask"),
    "mask_size": (
        lambda: make([3], [4]),
        {"sparse_mode": 3, "atten_mask": lambda: torch.ones(4, 4, dtype=torch.int8).triu(1).to("npu")},
        r"must be \(2048, 2048\)",
    ),
    "mask_dtype": (
        lambda: make([3], [4]),
        {"sparse_mode": 3, "atten_mask": lambda: causal_mask().bfloat16()},
        "must be bool or int8",
    ),
    "mask_values": (
        lambda: make([3], [4]),
        {"sparse_mode": 3, "atten_mask": lambda: causal_mask().logical_not()},
        "must be triu",
    ),
    "band_without_overlap": (
        lambda: make([3], [4]),
        {"sparse_mode": 4, "pre_tokens": -3, "next_tokens": 1, "atten_mask": causal_mask},
        "must overlap",
    ),
    "dtype": (lambda: make([3], [4])._replace(query=torch.zeros(3, 4, 128)), {}, "query must be of float16, bfloat16"),
    "mixed_dtypes": (lambda: make([3], [4])._replace(query=torch.zeros(3, 4, 128).half()), {}, "as the query"),
    "inner_precise": (lambda: make([3], [4]), {"inner_precise": 9}, "inner_precise must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_limit_of_attention_is_refused(name):
    build, changes, message = REFUSED[name]
    changes = {key: value() if callable(value) else value for key, value in changes.items()}
    with pytest.raises(RuntimeError, match=f"npu_fused_infer_attention_score.*561002.*{message}"):
        call(build(), **changes)


def test_query_with_gaps_is_refused():
    case = make([3], [4])
    wide = case._replace(query=torch.zeros(3, 4, 256).bfloat16())
    arguments = {**wide.arguments, "block_table": wide.arguments["block_table"].to("npu")}
    with pytest.raises(RuntimeError, match="query must be contiguous"):
        torch.ops.npu.npu_fused_infer_attention_score(
            wide.query.to("npu")[..., :128], case.key.flatten(2).to("npu"), case.value.flatten(2).to("npu"), **arguments
        )


@pytest.mark.parametrize(
    "changes", [{"input_layout": "BSH"}, {"query_padding_size": torch.zeros(1, dtype=torch.int64)}, {"sparse_mode": 2}]
)
def test_what_is_not_emulated_says_so(changes):
    with pytest.raises((NotImplementedError, RuntimeError), match="not emulated"):
        call(make([3], [4]), **changes)
