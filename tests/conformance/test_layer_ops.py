# SPDX-License-Identifier: Apache-2.0
"""`rms_norm`, `apply_rope`, `silu_and_mul` and packed linears, against the reference and against their formulas."""

from __future__ import annotations

import pytest
import torch

NUM_TOKENS = (0, 1, 2, 3, 8, 16, 17, 64, 127, 129, 300)
EPS = 1e-5


def normal(backend, dtype, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(backend.device, dtype)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("with_residual", [True, False])
def test_rms_norm(num_tokens, with_residual, dtype, backend, reference, assert_close):
    x, weight = normal(backend, dtype, num_tokens, 576), normal(backend, dtype, 576, seed=1)
    residual = normal(backend, dtype, num_tokens, 576, seed=2) if with_residual else None
    actual, expected = (b.rms_norm(x, weight, EPS, residual) for b in (backend, reference))
    assert_close(actual.normed, expected.normed)
    assert_close(actual.residual, expected.residual)


def test_rms_norm_formula(dtype, reference, assert_close):
    x, weight = normal(reference, dtype, 5, 64), normal(reference, dtype, 64, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_close(reference.rms_norm(x, weight, EPS).normed, expected.to(dtype))


def test_rms_norm_per_head(dtype, backend, reference, assert_close):
    x, weight = normal(backend, dtype, 7, 4, 64), normal(backend, dtype, 64, seed=1)
    assert_close(backend.rms_norm(x, weight, EPS).normed, reference.rms_norm(x, weight, EPS).normed)


def test_rms_norm_leaves_its_inputs_alone(dtype, backend):
    x, weight, residual = (normal(backend, dtype, *shape) for shape in ((3, 64), (64,), (3, 64)))
    copies = [t.clone() for t in (x, weight, residual)]
    backend.rms_norm(x, weight, EPS, residual)
    assert all(torch.equal(t, copy) for t, copy in zip((x, weight, residual), copies, strict=True))


def angles(backend, num_tokens, rotary_dim):
    positions = torch.arange(num_tokens, device=backend.device, dtype=torch.float32)[:, None]
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=backend.device) / rotary_dim)
    return positions * frequencies


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (64, 16), (128, 32)])
def test_apply_rope(num_tokens, head_dim, rotary_dim, dtype, backend, reference, assert_close):
    q, k = normal(backend, dtype, num_tokens, 6, head_dim), normal(backend, dtype, num_tokens, 2, head_dim, seed=1)
    angle = angles(backend, num_tokens, rotary_dim)
    actual, expected = (b.apply_rope(q, k, angle.cos(), angle.sin()) for b in (backend, reference))
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


def test_rope_is_a_complex_rotation_of_half_pairs(dtype, reference, assert_close):
    q, k = normal(reference, dtype, 5, 3, 64), normal(reference, dtype, 5, 1, 64)
    angle = angles(reference, 5, 64).double()
    pairs = torch.complex(q[..., :32].double(), q[..., 32:].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    actual, _ = reference.apply_rope(q, k, angle.cos().float(), angle.sin().float())
    assert_close(actual, torch.cat((turned.real, turned.imag), -1).to(dtype))


def test_rope_takes_views_of_a_merged_projection(backend, reference, assert_close):
    merged = normal(backend, torch.float32, 4, 5 * 64)
    q, k, _ = (x.unflatten(1, (-1, 64)) for x in merged.split([3 * 64, 64, 64], dim=1))
    angle = angles(backend, 4, 64)
    actual, expected = (b.apply_rope(q, k, angle.cos(), angle.sin()) for b in (backend, reference))
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_silu_and_mul(num_tokens, dtype, backend, reference, assert_close):
    gate_up = normal(backend, dtype, num_tokens, 2 * 192)
    copy = gate_up.clone()
    assert_close(backend.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    assert torch.equal(gate_up, copy), "the input is left alone"


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 10), (576, 960), (192, 64)])
def test_packed_linear(num_inputs, num_outputs, with_bias, dtype, backend, assert_close):
    weight = normal(backend, dtype, num_outputs, num_inputs, seed=1) * num_inputs**-0.5
    bias = normal(backend, dtype, num_outputs, seed=2) if with_bias else None
    linear = backend.pack_linear(weight.clone(), bias)
    wide, shift = weight.cpu().double(), 0 if bias is None else bias.cpu().double()  # not every device has fp64
    for num_tokens in NUM_TOKENS:
        x = normal(backend, dtype, num_tokens, num_inputs)
        assert_close(linear(x).cpu(), (x.cpu().double() @ wide.T + shift).to(dtype))


def test_packed_linear_rows_do_not_depend_on_their_number(backend, assert_close):
    weight, x = normal(backend, torch.float32, 960, 576) * 576**-0.5, normal(backend, torch.float32, 300, 576, seed=1)
    linear = backend.pack_linear(weight, None)
    whole = linear(x)
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 128):
        assert_close(linear(x[:num_rows]), whole[:num_rows])


def test_packed_linear_takes_strided_rows(backend, assert_close):
    weight, x = normal(backend, torch.float32, 96, 64), normal(backend, torch.float32, 6, 128, seed=1)
    linear = backend.pack_linear(weight.clone(), None)
    assert_close(linear(x[:, :64]), x[:, :64] @ weight.T)


# The bodies compute in fp32 whatever they get, so that double inputs would not help.
@pytest.mark.filterwarnings("ignore:Input #:UserWarning")
@pytest.mark.parametrize("op", ["rms_norm", "apply_rope", "silu_and_mul"])
def test_reference_gradients_match_finite_differences(op, reference):
    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float32, device=reference.device, requires_grad=True)

    torch.manual_seed(0)
    angle = angles(reference, 3, 4)
    call, inputs = {
        "rms_norm": (lambda x, w, r: reference.rms_norm(x, w, EPS, r).normed, (leaf(3, 4), leaf(4), leaf(3, 4))),
        "apply_rope": (
            lambda q, k: reference.apply_rope(q, k, angle.cos(), angle.sin()),
            (leaf(3, 2, 6), leaf(3, 1, 6)),
        ),
        "silu_and_mul": (reference.silu_and_mul, (leaf(3, 8),)),
    }[op]
    assert torch.autograd.gradcheck(call, inputs, eps=1e-3, atol=1e-2, rtol=1e-2)


def test_reference_attention_sends_gradients_to_q_k_and_v(reference, paged_case):
    case = paged_case([2, 3], [5, 20])
    k_cache, v_cache = (cache.nan_to_num().requires_grad_() for cache in case.caches(reference))
    q = case.q.to(reference.device).requires_grad_()
    meta = reference.attention_metadata(case.batch(reference.device))
    reference.paged_attention(q, k_cache, v_cache, meta, 0.125, True).square().sum().backward()
    assert all(t.grad is not None and bool(t.grad.abs().sum() > 0) for t in (q, k_cache, v_cache))
