# SPDX-License-Identifier: Apache-2.0
"""Aten operators on the device: the CPU's values, and the aliasing of a device."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

FUNCTIONAL = {
    "add": lambda x: x + 2.5,
    "mul": lambda x: x * x.flip(0),
    "where": lambda x: torch.where(x > 0, x, -x),
    "matmul": lambda x: x @ x.t(),
    "addmm": lambda x: torch.addmm(x @ x.t(), x, x.t(), beta=0.5),
    "linear": lambda x: F.linear(x, x),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    "silu": F.silu,
    "gelu": F.gelu,
    "mean": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x: x.var(0),
    "amax": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(-1),
    "sort": lambda x: x.sort(dim=-1, descending=True, stable=True),
    "topk": lambda x: x.topk(2, -1),
    "cumsum": lambda x: x.cumsum(1),
    "gather": lambda x: x.gather(1, (x.argsort(1) % x.shape[1])),
    "index": lambda x: x[torch.tensor([1, 0], device=x.device)],
    "host_index": lambda x: x[torch.tensor([1, 0])],
    "mask": lambda x: x[x > 0],
    "embedding": lambda x: F.embedding(torch.tensor([[1, 0, 1]], device=x.device), x),
    "cat": lambda x: torch.cat((x, x * 2), 1),
    "stack": lambda x: torch.stack((x, x + 1)),
    "tril": lambda x: x.tril(),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rsqrt": lambda x: (x.square() + 1).rsqrt(),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "nonzero": lambda x: (x > 0).nonzero(),
    "any": lambda x: (x > 1).any(-1),
    "unique": lambda x: torch.unique((x * 2).round()),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64, device=x.device)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 0),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, (x > 0).long(), x),
    "arange": lambda x: torch.arange(3, 9, 2, device=x.device),
    "full": lambda x: torch.full((2, 3), 1.5, device=x.device),
    "one_hot": lambda x: F.one_hot(x.argmax(-1), x.shape[1]),
    "to": lambda x: x.to(torch.bfloat16).float(),
    "foreach": lambda x: torch._foreach_add([x, x], 1.0),
    "bool_and": lambda x: (x > 0) & (x < 1),
    "isfinite": lambda x: torch.isfinite(x),
}

IN_PLACE = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(x.clone()),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(3),
    "clamp_": lambda x: x.clamp_(min=0),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 7),
    "index_put_": lambda x: x.index_put_((torch.tensor([1], device=x.device),), torch.tensor(5.0, device=x.device)),
    "scatter_": lambda x: x.scatter_(1, torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device), 9.0),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0], device=x.device), x[1:2].clone()),
    "copy_": lambda x: x.copy_(x.flip(1)),
    "setitem": lambda x: x.__setitem__((slice(None), 0), -1.0),
    "addmm_": lambda x: x.addmm_(x[:, :2].clone(), x[:2].clone()),
    "foreach_": lambda x: torch._foreach_mul_([x], 2.0),
}

VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, 1:],
    "steps": lambda x: x[::2],
    "reshaped": lambda x: x.reshape(-1, 2),
    "flipped_diagonal": lambda x: x.unfold(0, 2, 1)[:, :, 0],
}

floats = st.floats(-3, 3, width=16, allow_subnormal=False)
shapes = st.tuples(st.sampled_from([4, 6]), st.sampled_from([4, 6]))


def leaves(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list | tuple) else []


def values(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FUNCTIONAL)
@given(shape=shapes, seed=st.integers(0, 99), view=st.sampled_from(sorted(set(VIEWS) - {"flipped_diagonal"})))
@settings(deadline=None, max_examples=6)
def test_functional_operator_equals_the_cpus(name, shape, seed, view):
    x = values(shape, seed)
    device = x.to("npu")
    expected = leaves(FUNCTIONAL[name](VIEWS[view](x)))
    results = leaves(FUNCTIONAL[name](VIEWS[view](device)))
    assert len(results) == len(expected) > 0
    for result, wanted in zip(results, expected, strict=True):
        assert result.device.type == "npu"
        assert result.dtype == wanted.dtype
        torch.testing.assert_close(result.cpu(), wanted, rtol=0, atol=0)
    assert torch.equal(device.cpu(), x), "an input changed"


@pytest.mark.parametrize("name", IN_PLACE)
@given(shape=shapes, seed=st.integers(0, 99), view=st.sampled_from(sorted(VIEWS)))
@settings(deadline=None, max_examples=8)
def test_in_place_operator_writes_through_its_view(name, shape, seed, view):
    host = values(shape, seed)
    device = host.to("npu")
    address = device.data_ptr()
    IN_PLACE[name](VIEWS[view](host))
    IN_PLACE[name](VIEWS[view](device))
    assert device.data_ptr() == address
    torch.testing.assert_close(device.cpu(), host, rtol=0, atol=0)


def test_in_place_operator_returns_its_tensor():
    x = torch.ones(3, device="npu")
    assert x.add_(1) is x
    assert x[1:].mul_(2).data_ptr() == x.data_ptr() + 4


@given(shape=shapes, seed=st.integers(0, 99), aliased=st.booleans())
@settings(deadline=None, max_examples=10)
def test_out_argument_may_be_an_input_or_of_another_size(shape, seed, aliased):
    x = values(shape, seed)
    a, b = x.to("npu"), x.flip(0).to("npu")
    out = a if aliased else torch.empty(0, device="npu")
    assert torch.add(a, b, out=out) is out
    assert torch.equal(out.cpu(), x + x.flip(0))


def test_empty_tensors_pass_through():
    x = torch.empty(0, 4, device="npu")
    assert (x @ torch.ones(4, 3, device="npu")).shape == (0, 3)
    assert x.sum().item() == 0
    assert torch.cat((x, torch.ones(1, 4, device="npu"))).cpu().tolist() == [[1, 1, 1, 1]]


def test_gradients_equal_the_cpus():
    def loss(x: Tensor, w: Tensor) -> Tensor:
        hidden = F.silu(F.linear(x, w)).softmax(-1)
        return F.cross_entropy(hidden @ w, torch.tensor([0, 1, 2], device=x.device)) + hidden[:, 1:].pow(2).mean()

    x, w = values((3, 4), 0), values((5, 4), 1)
    host = [t.clone().requires_grad_() for t in (x, w)]
    device = [t.to("npu").requires_grad_() for t in (x, w)]
    loss(*host).backward()
    loss(*device).backward()
    for ours, wanted in zip(device, host, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), wanted.grad)


def test_host_tensor_beside_device_tensors_is_refused():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="npu") + torch.ones(3)
    assert (torch.ones(3, device="npu") + torch.tensor(2.0)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_matmul_of_a_dtype_the_cube_lacks_is_refused(dtype):
    x = torch.ones(2, 2, dtype=dtype, device="npu")
    with pytest.raises(RuntimeError, match=r"561002.*float16"):
        x @ x


def test_operator_without_a_kernel_is_an_error_that_names_it():
    x = torch.ones(4, 8, dtype=torch.float16, device="npu")
    with pytest.raises(RuntimeError, match="aclnnGeGlu"):
        torch.ops.npu.npu_geglu(x)


def test_operators_work_in_other_threads():
    results: list[list[float]] = []

    def work(start: int) -> None:
        x = torch.arange(4, device="npu", dtype=torch.float32)
        for _ in range(20):
            x = x + start
        results.append(x.tolist())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [[20.0 * i + j for j in range(4)] for i in range(4)]


def test_inference_mode_keeps_in_place_updates():
    with torch.inference_mode():
        x = torch.zeros(3, device="npu")
        x[1] = 2
        x.add_(1)
    assert x.tolist() == [1, 3, 1]


def test_seed_decides_random_numbers():
    draws = []
    for seed in (1, 1, 2):
        torch.npu.manual_seed(seed)
        draws.append((torch.rand(3, device="npu"), torch.randn(3, device="npu"), torch.randint(9, (3,), device="npu")))
    first, again, other = ([t.cpu() for t in draw] for draw in draws)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(torch.rand(5, device="npu").cpu(), torch.rand(5, device="npu").cpu())


def test_device_random_numbers_leave_the_cpus_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    torch.rand(4, device="npu")
    F.dropout(torch.ones(4), 0.0)
    assert torch.equal(torch.rand(2), expected)


def test_own_generator_is_followed():
    def draw() -> Tensor:
        generator = torch.Generator(device="npu").manual_seed(11)
        return torch.empty(6, device="npu").exponential_(generator=generator).cpu()

    assert torch.equal(draw(), draw())
    assert bool((draw() > 0).all())
