# SPDX-License-Identifier: Apache-2.0
"""npu_top_k_top_p keeps what sorting in the other direction keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@given(rows=st.integers(1, 4), size=st.integers(2, 40), seed=st.integers(0, 999), data=st.data())
@settings(deadline=None, max_examples=40)
def test_filters_equal_those_from_the_top(rows, size, seed, data):
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    k = torch.tensor(data.draw(st.lists(st.integers(1, size), min_size=rows, max_size=rows)), dtype=torch.int32)
    p = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.3, 0.9, 1.0]), min_size=rows, max_size=rows)))
    result = torch.ops.npu.npu_top_k_top_p(logits.to("npu"), p.to("npu"), k.to("npu")).cpu()
    for row in range(rows):
        order = logits[row].argsort(descending=True)[: int(k[row])]
        probabilities = logits[row, order].double().softmax(-1)
        before = probabilities.cumsum(0) - probabilities
        kept = order[(before < p[row].double()) | (torch.arange(len(order)) == 0)]
        if p[row] in (0.0, 1.0) or float((before - p[row].double()).abs().min()) > 1e-5:
            assert sorted(result[row].isfinite().nonzero().flatten().tolist()) == sorted(kept.tolist())
        assert torch.equal(result[row][result[row].isfinite()], logits[row][result[row].isfinite()])


@pytest.mark.parametrize(
    ("p", "k", "message"),
    [
        ([0.5], [0], r"k must be in \[1, 8\]"),
        ([0.5], [9], r"k must be in \[1, 8\]"),
        ([1.5], [3], r"p must be in \[0, 1\]"),
        ([0.5, 0.5], [3], "p must be torch.float32 of"),
        ([0.5], [3, 3], "k must be int32 of"),
    ],
)
def test_wrong_filters_are_refused(p, k, message):
    logits = torch.zeros(1, 8, device="npu")
    with pytest.raises(RuntimeError, match=f"npu_top_k_top_p.*561002.*{message}"):
        torch.ops.npu.npu_top_k_top_p(
            logits, torch.tensor(p, device="npu"), torch.tensor(k, dtype=torch.int32, device="npu")
        )
