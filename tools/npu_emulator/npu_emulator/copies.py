# SPDX-License-Identifier: Apache-2.0
"""Copies: between host and device through the runtime, as torch_npu does it; on a device by the CPU's kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_emulator.launch import launch_or_run
from npu_emulator.registration import own_kernel, register
from npu_emulator.views import Operands, is_device

OPERATORS = frozenset({"copy_", "_to_copy"})


class Copy:
    """`aten::copy_`; torch_npu's own kernel moves the bytes where both sides look the same.

    Args:
        own_kernel: torch_npu's kernel.
    """

    def __init__(self, own_kernel: Any) -> None:
        self.own_kernel = own_kernel

    def __call__(
        self, keys: torch._C.DispatchKeySet, target: Tensor, source: Tensor, non_blocking: bool = False
    ) -> Tensor:
        """Copy `source`, broadcast, into `target`."""
        if not target.numel():
            return target
        if is_device(target) and is_device(source):
            _copy_on_device(target, source)
        elif is_device(target):
            self._to_device(keys, target, source, non_blocking)
        else:
            self._to_host(keys, target, source, non_blocking)
        return target

    def _to_device(self, keys: torch._C.DispatchKeySet, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        if not non_blocking:
            source = source.to(target.dtype)
        if source.shape != target.shape:
            source = source.expand_as(target)
        source = source.contiguous()
        if target.is_contiguous() and target.dtype == source.dtype:
            self.own_kernel.call_boxed(keys, target, source, non_blocking)
            return
        same = torch.empty(target.shape, dtype=source.dtype, device=target.device)
        self.own_kernel.call_boxed(keys, same, source, non_blocking)
        _copy_on_device(target, same)

    def _to_host(self, keys: torch._C.DispatchKeySet, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        if source.shape != target.shape:
            source = source.expand_as(target)
        if source.dtype != target.dtype and non_blocking:
            source = source.to(target.dtype)
        source = source.contiguous()
        if target.is_contiguous() and target.dtype == source.dtype:
            self.own_kernel.call_boxed(keys, target, source, non_blocking)
            return
        same = torch.empty(target.shape, dtype=source.dtype)
        self.own_kernel.call_boxed(keys, same, source, False)
        target.copy_(same)


def _copy_on_device(target: Tensor, source: Tensor) -> None:
    operands = Operands("aten::copy_")
    to = operands.add(target)
    operands.device = None  # a copy may cross devices
    from_ = operands.add(source)

    launch_or_run("aten::copy_", target.device.index, operands.kernel(lambda: to.copy_(from_), target))


def _to_copy(
    source: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """`aten::_to_copy`: a new tensor of the wanted kind, and a copy into it."""
    dtype, device = dtype or source.dtype, device or source.device
    if memory_format in (None, torch.preserve_format):
        meta = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
        stride = torch.empty_like(meta).stride()
        target = torch.empty_strided(source.shape, stride, dtype=dtype, device=device)
    else:
        target = torch.empty(source.shape, dtype=dtype, device=device, memory_format=memory_format)
    if pin_memory:
        target = target.pin_memory()
    return target.copy_(source, non_blocking)


def install() -> None:
    """Register both kernels."""
    register("aten::copy_", Copy(own_kernel("aten::copy_")), with_keys=True)
    register("aten::_to_copy", _to_copy)
