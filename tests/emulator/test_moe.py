# SPDX-License-Identifier: Apache-2.0
"""Routing and grouped products: a whole mixture of experts equals the loop over its experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

npu = torch.ops.npu


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(tokens=st.integers(1, 9), experts=st.integers(2, 6), k=st.integers(1, 2), as_counts=st.booleans())
@settings(deadline=None, max_examples=20)
def test_experts_equal_the_loop_over_them(tokens, experts, k, as_counts):
    x, router = random(tokens, 16), random(tokens, experts, seed=1)
    up, down = random(experts, 16, 24, seed=2), random(experts, 12, 16, seed=3)
    weights, chosen, _ = npu.npu_moe_gating_top_k_softmax(router.to("npu"), None, k)
    rows, row_idx, groups, _ = npu.npu_moe_init_routing_v2(
        x.to("npu"),
        chosen,
        expert_num=experts,
        active_expert_range=[0, experts],
        expert_tokens_num_type=int(as_counts),
        expert_tokens_num_flag=True,
    )
    kind = {"split_item": 2, "group_type": 0, "group_list": groups, "group_list_type": int(as_counts)}
    hidden = npu.npu_swiglu(npu.npu_grouped_matmul([rows], [up.to("npu")], **kind)[0])
    outputs = npu.npu_grouped_matmul([hidden], [down.to("npu")], **kind)[0]
    result = npu.npu_moe_token_unpermute(outputs, row_idx, weights)

    wanted = torch.zeros(tokens, 16)
    probabilities = router.softmax(-1)
    for token in range(tokens):
        for expert in probabilities[token].topk(k).indices.tolist():
            gate, value = (x[token] @ up[expert]).chunk(2)
            wanted[token] += probabilities[token, expert] * ((F.silu(gate) * value) @ down[expert])
    torch.testing.assert_close(result.cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_row_indices_say_where_rows_went_or_came_from():
    chosen = torch.tensor([[2, 0], [0, 1]], dtype=torch.int32)
    x = torch.tensor([[1.0], [2.0]])
    arguments = {"expert_num": 3, "active_expert_range": [0, 3], "expert_tokens_num_flag": True}
    rows, gather, cumulative, _ = npu.npu_moe_init_routing_v2(x.to("npu"), chosen.to("npu"), **arguments)
    assert rows.flatten().tolist() == [1, 2, 2, 1]
    assert gather.tolist() == [3, 0, 1, 2]
    assert cumulative.tolist() == [2, 3, 4]
    _, scatter, _, _ = npu.npu_moe_init_routing_v2(x.to("npu"), chosen.to("npu"), row_idx_type=1, **arguments)
    assert scatter.tolist() == [1, 2, 3, 0]


def test_gating_top_k_by_sigmoid_with_bias_and_groups():
    x, bias = random(5, 16), random(16, seed=1)
    weights, chosen, scores = npu.npu_moe_gating_top_k(
        x.to("npu"), 3, bias=bias.to("npu"), k_group=2, group_count=4, group_select_mode=1, norm_type=1, out_flag=True
    )
    sigmoid = x.sigmoid()
    ranked = (sigmoid + bias).view(5, 4, 4)
    groups = ranked.topk(2, -1).values.sum(-1).topk(2, -1).indices
    for token in range(5):
        allowed = torch.full((4, 4), float("-inf"))
        allowed[groups[token]] = ranked[token, groups[token]]
        wanted = allowed.flatten().topk(3).indices
        assert chosen[token].tolist() == wanted.tolist()
        share = sigmoid[token, wanted] / sigmoid[token, wanted].sum()
        torch.testing.assert_close(weights[token].cpu(), share)
    torch.testing.assert_close(scores.cpu(), sigmoid)


@pytest.mark.parametrize("k", [0, 5])
def test_gating_refuses_a_wrong_k(k):
    with pytest.raises(RuntimeError, match=r"561002.*k must be 1 to 4"):
        npu.npu_moe_gating_top_k_softmax(torch.ones(2, 4, device="npu"), None, k)
    with pytest.raises(RuntimeError, match=r"561002.*k must be 1 to 4"):
        npu.npu_moe_gating_top_k(torch.ones(2, 4, device="npu"), k)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_list": torch.tensor([1, 2, 3])}, r"group_list must be int64 of \(2,\)"),
        ({"group_list": torch.tensor([1, 2], dtype=torch.int32)}, "group_list must be int64"),
        ({"group_list": torch.tensor([2, 1])}, "groups must not be negative"),
        ({"group_list": torch.tensor([2, 9])}, "have 4 rows at most"),
    ],
)
def test_grouped_matmul_refuses_wrong_groups(changes, message):
    arguments = {name: value.to("npu") for name, value in changes.items()}
    with pytest.raises(RuntimeError, match=f"npu_grouped_matmul.*561002.*{message}"):
        npu.npu_grouped_matmul(
            [torch.ones(4, 3, device="npu")],
            [torch.ones(2, 3, 5, device="npu")],
            split_item=2,
            group_type=0,
            **arguments,
        )


def test_rows_outside_of_all_groups_are_not_numbers():
    result = npu.npu_grouped_matmul(
        [torch.ones(4, 3, device="npu")],
        [torch.ones(2, 3, 5, device="npu")],
        split_item=2,
        group_type=0,
        group_list=torch.tensor([1, 3], device="npu"),
    )[0]
    assert bool(result[:3].eq(3).all())
    assert bool(result[3].isnan().all())


def test_routing_refuses_an_expert_that_is_not_there():
    with pytest.raises(RuntimeError, match=r"experts must be in \[0, 2\]"):
        npu.npu_moe_init_routing_v2(
            torch.ones(1, 4, device="npu"),
            torch.tensor([[3]], dtype=torch.int32, device="npu"),
            expert_num=3,
            active_expert_range=[0, 3],
        )


def test_routing_wants_the_range_of_experts():
    with pytest.raises(RuntimeError, match="active_expert_range must be given"):
        npu.npu_moe_init_routing_v2(
            torch.ones(1, 4, device="npu"), torch.tensor([[0]], dtype=torch.int32, device="npu"), expert_num=3
        )
