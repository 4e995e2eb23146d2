# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary embeddings and SwiGLU against fp64 formulas, with their gradients and their limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
npu = torch.ops.npu


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close_to_one_rounding(result: Tensor, exact: Tensor) -> None:
    """Half a unit in the last place from the exact value, but for what fp32 arithmetic loses."""
    rounding = 0.0 if result.dtype == torch.float32 else torch.finfo(result.dtype).eps / 2
    torch.testing.assert_close(result.cpu().double(), exact, rtol=rounding + 2e-6, atol=1e-6)


def exact_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma.double()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_once(dtype):
    x, gamma = random(7, 96, dtype=dtype), 1 + 0.1 * random(96, seed=1)
    for weight in (gamma.to(dtype), gamma):
        result, rstd = npu.npu_rms_norm(x.to("npu"), weight.to("npu"), 1e-5)
        close_to_one_rounding(result, exact_norm(x, weight, 1e-5))
        assert rstd.shape == (7, 1)
        assert rstd.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_norm_rstd_and_sum(dtype):
    x, y, gamma = random(5, 64, dtype=dtype), random(5, 64, dtype=dtype, seed=1), random(64, dtype=dtype, seed=2)
    result, rstd, total = npu.npu_add_rms_norm(x.to("npu"), y.to("npu"), gamma.to("npu"), 1e-6)
    close_to_one_rounding(result, exact_norm(x.double() + y.double(), gamma, 1e-6))
    close_to_one_rounding(total, x.double() + y.double())
    assert rstd.shape == (5, 1)


@pytest.mark.parametrize(
    ("x", "gamma", "message"),
    [
        (random(2, 8), random(8).bfloat16(), "gamma must be torch.float32"),
        (random(2, 8).half(), random(8).bfloat16(), "gamma must be torch.float16 or float32"),
        (random(2, 8).double(), random(8).double(), "input must be of"),
        (random(2, 8), random(4), "last axes of the input"),
    ],
)
def test_rms_norm_refuses_what_cann_does(x, gamma, message):
    with pytest.raises(RuntimeError, match=f"npu_rms_norm.*561002.*{message}"):
        npu.npu_rms_norm(x.to("npu"), gamma.to("npu"))


def test_add_rms_norm_refuses_what_cann_does():
    x = random(2, 8).to("npu")
    with pytest.raises(RuntimeError, match="one dtype"):
        npu.npu_add_rms_norm(x, x.half(), x[0])
    with pytest.raises(RuntimeError, match="shape of x1"):
        npu.npu_add_rms_norm(x, x[:1], x[0])
    with pytest.raises(RuntimeError, match="must not be empty"):
        npu.npu_add_rms_norm(x[:0], x[:0], x[0])


def gradients(function, *inputs: Tensor) -> list[Tensor]:
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    result = function(*leaves)
    weights = random(*result.shape, seed=9).to(result.device, result.dtype)
    (result * weights).sum().backward()
    return [leaf.grad.cpu() for leaf in leaves]


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@pytest.mark.parametrize(
    ("on_device", "reference", "inputs"),
    [
        (
            lambda x, g: npu.npu_rms_norm(x, g, 1e-6)[0],
            lambda x, g: F.rms_norm(x, (16,), g, 1e-6),
            (random(3, 5, 16), random(16, seed=1)),
        ),
        (
            lambda x: npu.npu_swiglu(x),
            lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
            (random(4, 12),),
        ),
        (
            lambda x, c, s: npu.npu_rotary_mul(x, c, s),
            lambda x, c, s: x * c + rotate_half(x) * s,
            (random(6, 3, 8), random(6, 1, 8, seed=1).tanh(), random(6, 1, 8, seed=2).tanh()),
        ),
    ],
    ids=["rms_norm", "swiglu", "rotary_mul"],
)
def test_gradients_equal_those_of_the_formula(on_device, reference, inputs):
    ours = gradients(on_device, *(value.to("npu") for value in inputs))
    wanted = gradients(reference, *inputs)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_gates_with_its_first_half(dtype):
    x = random(3, 10, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    close_to_one_rounding(npu.npu_swiglu(x.to("npu")), F.silu(gate) * up)
    with pytest.raises(RuntimeError, match="must be even"):
        npu.npu_swiglu(x.to("npu")[:, :9].contiguous())
    with pytest.raises(RuntimeError, match="contiguous"):
        npu.npu_swiglu(x.to("npu")[:, :8])
    with pytest.raises(RuntimeError, match="must not be empty"):
        npu.npu_swiglu(x.to("npu")[:0])


def angles(tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = random(tokens, 1, dim // 2, seed=3).repeat(1, 1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_mul_turns_halves(dtype):
    x, (cos, sin) = random(5, 3, 64, dtype=dtype), angles(5, 64, dtype)
    result = npu.npu_rotary_mul(x.to("npu"), cos.to("npu"), sin.to("npu"))
    close_to_one_rounding(result, x.double() * cos.double() + rotate_half(x.double()) * sin.double())


def test_rotary_mul_turns_neighbours_when_interleaved():
    x, (cos, sin) = random(5, 3, 8), angles(5, 8)
    result = npu.npu_rotary_mul(x.to("npu"), cos.to("npu"), sin.to("npu"), "interleave")
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    torch.testing.assert_close(result.cpu(), x * cos + turned * sin)


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        ((4, 2, 8), lambda c: c * 3, r"in \[-1, 1\]"),
        ((4, 2, 8), lambda c: c.half(), "r1 and r2 must be torch.float32"),
        ((4, 2, 8), lambda c: c[:1], "must broadcast"),
        ((4, 1000, 8), lambda c: c, "below 1000"),
        ((4, 2, 896), lambda c: c, "below 896"),
        ((4, 8), lambda c: c[:, 0], "3 .TND. or 4 axes"),
    ],
)
def test_rotary_mul_refuses_what_cann_does(shape, change, message):
    cos, sin = (change(value).to("npu") for value in angles(shape[0], shape[-1]))
    with pytest.raises(RuntimeError, match=f"npu_rotary_mul.*561002.*{message}"):
        npu.npu_rotary_mul(torch.ones(shape, device="npu"), cos, sin)


def test_apply_rotary_pos_emb_turns_its_inputs_in_place():
    query, key = random(6, 4, 128), random(6, 2, 128, seed=1)
    cos, sin = angles(6, 128)
    on_device = [value.to("npu") for value in (query, key, cos, sin)]
    results = npu.npu_apply_rotary_pos_emb(*on_device, layout="TND")
    for result, given, x in zip(results, on_device, (query, key), strict=False):
        torch.testing.assert_close(result.cpu(), x * cos + rotate_half(x) * sin)
        assert result.data_ptr() == given.data_ptr()


@pytest.mark.parametrize(
    ("dim", "changes", "message"),
    [
        (96, {}, "64 or 128"),
        (64, {"layout": "SBND"}, "BSND or TND"),
        (64, {"rotary_mode": "interleave"}, "must be half"),
    ],
)
def test_apply_rotary_pos_emb_refuses_what_cann_does(dim, changes, message):
    cos, sin = (value.to("npu") for value in angles(3, dim))
    query = torch.ones(3, 4, dim, device="npu")
    with pytest.raises(RuntimeError, match=f"561002.*{message}"):
        npu.npu_apply_rotary_pos_emb(query, query.clone(), cos, sin, **{"layout": "TND", **changes})


@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_mrope_looks_its_angles_up(rotary_dim):
    cache = random(20, rotary_dim)
    positions = torch.tensor([3, 0, 19])
    query, key = random(3, 4 * 64), random(3, 2 * 64, seed=1)
    results = npu.npu_mrope(
        positions.to("npu"), query.to("npu"), key.to("npu"), cache.to("npu"), 64, mrope_section=[0, 0, 0]
    )
    cos, sin = (half.repeat(1, 2).unsqueeze(1) for half in cache[positions].chunk(2, -1))
    for result, x in zip(results, (query, key), strict=True):
        heads = x.view(3, -1, 64)
        turned, passed = heads[..., :rotary_dim], heads[..., rotary_dim:]
        wanted = torch.cat((turned * cos + rotate_half(turned) * sin, passed), -1).flatten(1)
        torch.testing.assert_close(result.cpu(), wanted)


def test_mrope_refuses_what_cann_does():
    arguments = [torch.tensor([0]), random(1, 64), random(1, 64), random(4, 32)]
    with pytest.raises(RuntimeError, match=r"positions must be in \[0, 3\]"):
        npu.npu_mrope(*(a.to("npu") for a in (torch.tensor([4]), *arguments[1:])), 64, mrope_section=[0, 0, 0])
    with pytest.raises(RuntimeError, match="multiples of 16"):
        npu.npu_mrope(*(a.to("npu") for a in (*arguments[:3], random(4, 24))), 64, mrope_section=[0, 0, 0])
    with pytest.raises(RuntimeError, match="one dtype"):
        npu.npu_mrope(*(a.to("npu") for a in (*arguments[:3], random(4, 32).half())), 64, mrope_section=[0, 0, 0])
    with pytest.raises((NotImplementedError, RuntimeError), match="not emulated"):
        npu.npu_mrope(*(a.to("npu") for a in arguments), 64, mrope_section=[8, 4, 4])
