# SPDX-License-Identifier: Apache-2.0
"""Norm, rope, gating, sampling and runtime of the Ascend backend, on doubles of torch_npu's operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adaflash.errors import BackendError
from adaflash.ops.backend import OPS, Backend, Fallback
from adaflash.ops.metadata import SamplingMetadata, VerifyMetadata
from adaflash_ascend.backend import AscendBackend


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_op_is_native(backend: AscendBackend) -> None:
    assert backend.native_ops() == dict.fromkeys(OPS, True)


@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(with_residual: bool, backend: AscendBackend, reference: Backend, calls: Counter[str]) -> None:
    x, weight, residual = normal(5, 64), normal(64, seed=1), normal(5, 64, seed=2) if with_residual else None
    actual, expected = (b.rms_norm(x, weight, 1e-5, residual) for b in (backend, reference))
    torch.testing.assert_close(actual.normed, expected.normed)
    assert torch.equal(actual.residual, expected.residual)
    assert calls == {"npu_add_rms_norm" if with_residual else "npu_rms_norm": 1}


def test_silu_and_mul(backend: AscendBackend, reference: Backend, calls: Counter[str]) -> None:
    torch.testing.assert_close(backend.silu_and_mul(normal(5, 64)), reference.silu_and_mul(normal(5, 64)))
    assert calls == {"npu_swiglu": 1}


def test_rope(backend: AscendBackend, reference: Backend, calls: Counter[str]) -> None:
    q, k, angles = normal(5, 4, 64), normal(5, 2, 64, seed=1), normal(5, 32, seed=2)
    args = (q, k, angles.cos(), angles.sin())
    for actual, expected in zip(backend.apply_rope(*args), reference.apply_rope(*args), strict=True):
        torch.testing.assert_close(actual, expected)
    assert calls == {"npu_rotary_mul": 2}


def test_rope_takes_new_angles_and_dtypes_as_they_come(backend: AscendBackend, reference: Backend) -> None:
    q = normal(5, 4, 64)
    for seed in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            angles = normal(5, 32, seed=seed)
            args = (q.to(dtype), q.to(dtype), angles.cos(), angles.sin())
            actual, expected = (b.apply_rope(*args)[0] for b in (backend, reference))
            torch.testing.assert_close(actual, expected, rtol=1.6e-2, atol=1.6e-2)


def test_layers_share_the_factors_of_a_forward(backend: AscendBackend) -> None:
    cos, sin = normal(5, 32).cos(), normal(5, 32).sin()
    first, second = (backend._widened(cos, sin, torch.float32) for _ in range(2))
    assert first.wide_cos is second.wide_cos
    assert backend._widened(cos.clone(), sin, torch.float32).wide_cos is not first.wide_cos


def test_a_partial_rotation_falls_back_and_is_counted(
    backend: AscendBackend, reference: Backend, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    q, angles = normal(5, 4, 64), normal(5, 8, seed=2)
    args = (q, q, angles.cos(), angles.sin())
    with pytest.raises(BackendError, match=r"strict_ops: .* apply_rope .*rotary_dim equal.*rotary_dim=16 head_dim=64"):
        backend.apply_rope(*args)
    backend.strict_ops = False
    for _ in range(3):
        assert torch.equal(backend.apply_rope(*args)[0], reference.apply_rope(*args)[0])
    assert backend.fallbacks == {Fallback("apply_rope", "rotary_dim equal to head_dim"): 3}
    assert [record.message.count("op=apply_rope") for record in caplog.records] == [1], "logged once"
    assert not calls


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul", "apply_rope"])
def test_fp64_is_no_dtype_of_any_kernel(op: str, backend: AscendBackend) -> None:
    x = normal(5, 2, 64).double()
    call = {
        "rms_norm": lambda: backend.rms_norm(x, x[0, 0], 1e-5),
        "silu_and_mul": lambda: backend.silu_and_mul(x),
        "apply_rope": lambda: backend.apply_rope(x, x, normal(5, 32), normal(5, 32)),
    }[op]
    with pytest.raises(BackendError, match=f"{op} natively for one dtype of float16, bfloat16, float32 only.*float64"):
        call()


def test_what_needs_a_gradient_takes_the_differentiable_body(backend: AscendBackend, calls: Counter[str]) -> None:
    x, weight = normal(3, 8).requires_grad_(), normal(8)
    backend.rms_norm(x, weight, 1e-5).normed.sum().backward()
    assert x.grad is not None
    assert not calls
    assert not backend.fallbacks
    with torch.no_grad():
        backend.rms_norm(x, weight, 1e-5)
    assert calls == {"npu_rms_norm": 1}


def test_empty_batches_call_no_kernel(backend: AscendBackend, calls: Counter[str]) -> None:
    assert backend.silu_and_mul(normal(0, 64)).shape == (0, 32)
    assert backend.rms_norm(normal(0, 64), normal(64), 1e-5).normed.shape == (0, 64)
    assert not calls


# ---- sampling ------------------------------------------------------------------------------------------------------


def rows(num_rows: int, top_k: list[int] | None = None) -> SamplingMetadata:
    index = torch.arange(num_rows)
    return SamplingMetadata(
        all_greedy=False,
        temperature=torch.full((num_rows,), 0.8),
        top_k=None if top_k is None else torch.tensor(top_k, dtype=torch.int32).repeat(num_rows)[:num_rows],
        top_p=None,
        min_p=None,
        seed=index * 7919,
        sample_index=torch.zeros_like(index),
        output_index=index,
    )


@pytest.mark.parametrize("num_columns", [50, 3000])
@pytest.mark.parametrize("min_p", [None, 0.05])
@pytest.mark.parametrize(
    ("top_k", "is_native"), [([1, 5, 40], True), ([5, 0], False), ([1024], None), ([1025], False), (None, False)]
)
def test_top_k_runs_on_the_kernel_where_it_may_and_never_changes_a_token(
    num_columns: int,
    min_p: float | None,
    top_k: list[int] | None,
    is_native: bool | None,
    backend: AscendBackend,
    reference: Backend,
    calls: Counter[str],
) -> None:
    logits, sampling = 3 * normal(64, num_columns), rows(64, top_k)
    logits[:, 7:12] = logits[:, 3:4]  # ties, at the k-th place too
    logits[:, 13] = float("-inf")
    if min_p is not None:
        sampling = replace(sampling, min_p=torch.full((64,), min_p))
    assert torch.equal(backend.sample(logits, sampling), reference.sample(logits, sampling))
    assert bool(calls) == (num_columns > 1024 if is_native is None else is_native)


def test_top_p_is_left_to_the_reference(backend: AscendBackend, reference: Backend, calls: Counter[str]) -> None:
    logits, sampling = 3 * normal(64, 50), replace(rows(64, [5]), top_p=torch.full((64,), 0.7))
    assert torch.equal(backend.sample(logits, sampling), reference.sample(logits, sampling))
    assert not calls


def test_greedy_rows_among_sampled_ones_are_not_filtered(backend: AscendBackend, reference: Backend) -> None:
    logits, sampling = 3 * normal(64, 50), rows(64, [0, 5])
    sampling = replace(sampling, temperature=torch.tensor([0.0, 0.8]).repeat(32))
    assert torch.equal(backend.sample(logits, sampling), reference.sample(logits, sampling))


def test_verifying_by_rejection_is_a_fallback(backend: AscendBackend, reference: Backend) -> None:
    logits, drafts = normal(4, 50), torch.tensor([[3, 4, 5]])
    meta, draft_logits = VerifyMetadata(torch.tensor([0, 4]), [3]), normal(1, 3, 50, seed=1)
    coupled = [b.verify_drafts(logits, drafts, None, meta, rows(4)) for b in (backend, reference)]
    assert torch.equal(coupled[0].token_ids, coupled[1].token_ids)
    with pytest.raises(
        BackendError, match=r"verify_drafts natively for coupling gumbel only, found coupling rejection"
    ):
        backend.verify_drafts(logits, drafts, draft_logits, meta, rows(4))
    backend.strict_ops = False
    rejected = [b.verify_drafts(logits, drafts, draft_logits, meta, rows(4)) for b in (backend, reference)]
    assert torch.equal(rejected[0].token_ids, rejected[1].token_ids)


# ---- runtime -------------------------------------------------------------------------------------------------------


def test_another_block_size_is_refused(backend: AscendBackend) -> None:
    assert backend.kv_cache_shape(3, backend.preferred_block_size, 2, 128) == (3, 128, 2, 128)
    with pytest.raises(BackendError, match="block_size=16 is invalid on npu: must be 128"):
        backend.kv_cache_shape(3, 16, 2, 128)


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
)
def test_preferred_dtype_is_one_that_attention_takes(
    checkpoint: torch.dtype, expected: torch.dtype, backend: AscendBackend
) -> None:
    assert backend.preferred_dtype(checkpoint) is expected


def test_copies_read_every_source_before_they_write(backend: AscendBackend, reference: Backend) -> None:
    caches = [normal(4, 128, 2, 128, seed=seed) for seed in (0, 1)]
    copies = [cache.clone() for cache in caches]
    pairs = [(0, 1), (1, 2), (3, 0)]
    backend.copy_blocks(caches[0], caches[1], pairs)
    reference.copy_blocks(copies[0], copies[1], pairs)
    assert all(torch.equal(*both) for both in zip(caches, copies, strict=True))
    backend.copy_blocks(caches[0], caches[1], [])
    assert torch.equal(caches[0], copies[0])
