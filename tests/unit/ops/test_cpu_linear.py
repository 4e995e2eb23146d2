# SPDX-License-Identifier: Apache-2.0
"""The compiled linear layer: right for every shape, and a row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaflash.ops import cpu_linear
from adaflash.ops.backend import LinearFn
from adaflash.ops.cpu import CpuBackend
from adaflash.ops.cpu_linear import compiled_linear


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compiled(weight: Tensor, bias: Tensor | None = None) -> LinearFn:
    linear = compiled_linear(weight, bias)
    assert linear is not None, "PyTorch's OpenMP runtime is found and the shape fits"
    return linear


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    columns=st.integers(3, 200),
    depth=st.sampled_from([16, 48, 576, 4096]),
    num_threads=st.integers(1, 5),
    has_bias=st.booleans(),
)
def test_it_is_the_matrix_product_whatever_the_shape(
    rows: int, columns: int, depth: int, num_threads: int, has_bias: bool
) -> None:
    torch.set_num_threads(num_threads)
    x, weight = randn(rows, depth), randn(columns, depth, seed=1) * depth**-0.5
    bias = randn(columns, seed=2) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(compiled(weight, bias)(x), expected.float(), rtol=1e-5, atol=1e-5)


def test_it_runs_on_as_many_threads_as_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    used, region = [], cpu_linear.parallel_region()

    def counting(function: int, data: int, num_threads: int) -> None:
        used.append(num_threads)
        region(function, data, num_threads)

    monkeypatch.setattr(cpu_linear, "parallel_region", lambda: counting)
    linear = compiled(randn(30, 64))
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        linear(randn(2, 64))
    assert used == [1, 3]


def test_the_backend_says_that_rows_cost_in_steps_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CpuBackend().row_multiple == 4
    monkeypatch.setattr("adaflash.ops.cpu.has_threads", lambda: False)
    assert CpuBackend().row_multiple == 1


@pytest.mark.parametrize("depth", [64, 576, 8192])
def test_the_bits_of_a_row_depend_on_the_row_alone(depth: int) -> None:
    x, weight = randn(150, depth), randn(97, depth, seed=1)
    linear = compiled(weight)
    torch.set_num_threads(1)
    whole = linear(x)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for start, count in ((0, 1), (1, 2), (5, 3), (7, 4), (2, 5), (40, 33), (149, 1), (0, 150)):
            assert torch.equal(linear(x[start : start + count]), whole[start : start + count])
    assert torch.equal(linear(x.view(3, 50, depth)), whole.view(3, 50, 97))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    x, linear = randn(6, 64), compiled(randn(30, 64, seed=1))
    expected = linear(x)
    x[2, 5] = bad
    got = linear(x)
    assert not got[2].isfinite().any()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(got[rest], expected[rest])


def test_weights_are_not_copied() -> None:
    weight = randn(9, 32)
    linear, x = compiled(weight), randn(2, 32, seed=1)
    weight.mul_(2)
    torch.testing.assert_close(linear(x), x @ weight.T)


def test_threads_of_python_may_call_it_at_the_same_time() -> None:
    torch.set_num_threads(2)
    linear, inputs = compiled(randn(333, 576)), [randn(7, 576, seed=seed) for seed in range(8)]
    expected = [linear(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for got, want in zip(pool.map(linear, inputs), expected, strict=True):
                assert torch.equal(got, want)


def test_inputs_of_another_width_or_dtype_are_refused() -> None:
    linear = compiled(randn(9, 32))
    with pytest.raises(ValueError, match=r"x is \[2, 16\] torch.float32: must be \[..., 32\] torch.float32"):
        linear(randn(2, 16))
    with pytest.raises(ValueError, match=r"x is \[2, 32\] torch.float64"):
        linear(randn(2, 32).double())


WEIGHTS = {
    "depth of no whole cache lines": randn(12, 20),
    "fewer columns than a tile": randn(2, 64),
    "strided": randn(12, 64).T[:32].contiguous().T,
    "bf16": randn(12, 64).bfloat16(),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_it_does_not_take_go_to_pytorch(kind: str) -> None:
    weight = WEIGHTS[kind]
    assert compiled_linear(weight, None) is None
    x = randn(5, weight.shape[1]).to(weight.dtype)
    torch.testing.assert_close(CpuBackend().pack_linear(weight, None)(x), x @ weight.T)


def test_without_an_openmp_runtime_linears_go_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_threads", lambda: False)
    weight, x = randn(12, 64), randn(5, 64, seed=1)
    assert compiled_linear(weight, None) is None
    torch.testing.assert_close(CpuBackend().pack_linear(weight, None)(x), x @ weight.T)
