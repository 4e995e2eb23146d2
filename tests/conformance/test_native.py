# SPDX-License-Identifier: Apache-2.0
"""Shapes of a model that is served run on the backend's kernels: with `strict_ops`, a fallback is an error."""

from __future__ import annotations

import pytest
import torch

from adaflash.errors import BackendError
from adaflash.ops.metadata import SamplingMetadata, VerifyMetadata

DTYPE = torch.bfloat16


def normal(backend, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(backend.device, DTYPE)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("num_tokens", [1, 8, 300])
def test_layer_ops(num_tokens, backend, heads):
    x, shape = normal(backend, num_tokens, 1024), heads()
    backend.rms_norm(x, x[0].clone(), 1e-6)
    backend.rms_norm(x, x[0].clone(), 1e-6, x)
    backend.silu_and_mul(x)
    q, k = (normal(backend, num_tokens, n, shape.head_dim) for n in (shape.num_q_heads, shape.num_kv_heads))
    angles = torch.rand(num_tokens, shape.head_dim // 2).to(backend.device)
    backend.apply_rope(q, k, angles.cos(), angles.sin())


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("query_lens", "causal", "window"),
    [([1, 1, 1], True, None), ([1, 4, 16], True, None), ([300, 1, 8], True, 40), ([16, 16], False, None)],
)
def test_verify_draft_and_prefill(query_lens, causal, window, backend, paged_case):
    case = paged_case(query_lens, [n + 200 for n in query_lens], dtype=DTYPE)
    case.attend(backend, causal, window)
    backend.copy_blocks(*case.caches(backend), [(0, 1)])


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("all_greedy", [True, False])
def test_sampling_and_verification(all_greedy, backend):
    logits = normal(backend, 6, 2000)
    rows = SamplingMetadata.greedy(6, backend.device)
    if not all_greedy:
        index = torch.arange(6, device=backend.device)
        temperature = torch.ones(6, device=backend.device)
        rows = SamplingMetadata(False, temperature, index.int() + 5, None, None, index, index, index)
    backend.sample(logits, rows)
    meta = VerifyMetadata(torch.tensor([0, 3, 6], device=backend.device), [2, 2])
    backend.verify_drafts(logits, torch.zeros(2, 2, dtype=torch.int64, device=backend.device), None, meta, rows)


@pytest.mark.usefixtures("strict")
def test_a_fallback_fails_where_it_is_forbidden(backend, paged_case, heads):
    if backend.reference_is_native:
        pytest.skip("on this device a reference body is no fallback")
    case = paged_case([1], [40], heads=heads(head_dim=72), dtype=DTYPE)
    with pytest.raises(BackendError, match=r"strict_ops: .* paged_attention .* head_dim"):
        case.attend(backend)
