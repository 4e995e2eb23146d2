# SPDX-License-Identifier: Apache-2.0
"""Registers kernels of `npu::` operators. torch_npu's own code runs first: it checks and allocates the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from npu_emulator import runtime
from npu_emulator.launch import launch_or_run
from npu_emulator.registration import own_kernel, register
from npu_emulator.views import Operands, transform

Compute = Callable[..., Any]
_ComputeT = TypeVar("_ComputeT", bound=Compute)


class _Entry(NamedTuple):
    operators: frozenset[str]
    check: Compute | None
    allocates: Compute | None
    compute: Compute


_kernels: dict[str, _Entry] = {}


def kernel(
    name: str, *operators: str, check: Compute | None = None, allocates: Compute | None = None
) -> Callable[[_ComputeT], _ComputeT]:
    """Make a function the kernel of `npu::name`.

    The function takes CPU tensors in the place of device tensors, under the names of the schema, and returns what the
    operator returns; None stands for an output nobody may read. It runs when the stream gets that far, so what it
    finds wrong in values shows then.

    Args:
        name: The operator, with its overload if it has one.
        operators: The aclnn operators torch_npu's own code launches for it, one of which must appear.
        check: Called first, with the arguments of the call; raises `LimitError` for what CANN does not take.
        allocates: Makes the outputs in the place of torch_npu's own code, where that needs what only CANN knows.
    """

    def add(compute: _ComputeT) -> _ComputeT:
        _kernels[name] = _Entry(frozenset(operators), check, allocates, compute)
        return compute

    return add


class NpuOperator:
    """The device kernel of one `npu::` operator."""

    def __init__(self, name: str, entry: _Entry) -> None:
        self.name = f"npu::{name}"
        self.entry = entry
        self.own_code = own_kernel(self.name)

    def __call__(self, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Check, let torch_npu allocate, compute."""
        if self.entry.check is not None:
            self.entry.check(*args, **kwargs)
        operands = Operands(self.name, host_tensors_allowed=True)
        host_args = transform(args, operands.add)
        host_kwargs = {key: transform(value, operands.add) for key, value in kwargs.items()}
        outputs = self._outputs(keys, args, kwargs)
        assert operands.device is not None, f"{self.name} was called without a device tensor"
        device = operands.device.index
        run = operands.kernel(lambda: self.entry.compute(*host_args, **host_kwargs), outputs)
        launch_or_run(self.name, device, run)
        return outputs

    def _outputs(self, keys: torch._C.DispatchKeySet, args: Any, kwargs: Any) -> Any:
        if self.entry.allocates is not None:
            return self.entry.allocates(*args, **kwargs)
        outputs, launched = runtime.host_code(lambda: self.own_code.call_boxed(keys, *args, **kwargs))
        assert launched, f"{self.name}: torch_npu launched nothing"
        known = self.entry.operators
        assert known.issuperset(launched), f"{self.name} launched {launched}, its kernel stands for {sorted(known)}"
        return outputs


def install() -> None:
    """Register every kernel of this package for torch_npu's devices."""
    for name, entry in _kernels.items():
        register(f"npu::{name}", NpuOperator(name, entry), with_keys=True)
