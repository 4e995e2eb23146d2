# SPDX-License-Identifier: Apache-2.0
"""CPU tensors over device memory, and device tensors for what a CPU kernel returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from npu_emulator import runtime

_CPU = torch.device("cpu")


def is_device(tensor: Tensor) -> bool:
    """Whether it lives on an emulated device."""
    return tensor.device.type == "npu"


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory; it does not keep the memory alive, as a kernel's pointer does not."""
    storage = tensor.untyped_storage()
    memory = _memory(storage.data_ptr(), storage.nbytes(), tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@functools.lru_cache(maxsize=4096)
def _memory(address: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Device memory as a CPU tensor of one axis; it owns nothing, so one that is out of date does no harm."""
    with torch.inference_mode(False):
        storage = torch._C._construct_storage_from_data_pointer(address, _CPU, num_bytes)
        return torch.empty(0, dtype=dtype).set_(storage, 0, (num_bytes // dtype.itemsize,), (1,))


def transform(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to what is not a list or a tuple."""
    if isinstance(value, list | tuple):
        return [transform(item, change) for item in value]
    return change(value)


def leaves(value: Any) -> list[Any]:
    """The items of nested lists and tuples, in order."""
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def _target(output: Any) -> Tensor | None:
    return host_view(output) if isinstance(output, Tensor) and is_device(output) else None


class Operands:
    """The arguments of one call: CPU views of its device tensors, and the way back from them.

    Attributes:
        tensors: The device tensors, in order.
        views: Their CPU views.
        device: The device they are on; None if there is none.
    """

    def __init__(self, name: str, host_tensors_allowed: bool = False) -> None:
        self.name = name
        self.host_tensors_allowed = host_tensors_allowed
        self.tensors: list[Tensor] = []
        self.views: list[Tensor] = []
        self.device: torch.device | None = None

    def add(self, value: Any) -> Any:
        """What stands for an argument, or for one item of it, in the call of the CPU kernel."""
        if isinstance(value, Tensor):
            return self._add_tensor(value)
        if isinstance(value, torch.device) and value.type == "npu":
            index = runtime.npu().current_device() if value.index is None else value.index
            self.device = self.device or torch.device("npu", index)
            return _CPU
        return value

    def _add_tensor(self, tensor: Tensor) -> Tensor:
        if not is_device(tensor):
            if tensor.dim() and not self.host_tensors_allowed:
                raise RuntimeError(
                    f"{self.name}: expected all tensors to be on the same device, but found one of shape "
                    f"{tuple(tensor.shape)} on {tensor.device}"
                )
            return tensor.clone()  # its value now, whenever the kernel runs
        if self.device is not None and tensor.device != self.device:
            raise RuntimeError(
                f"{self.name}: expected all tensors to be on the same device, but found {self.device} and "
                f"{tensor.device}"
            )
        self.device = tensor.device
        view = host_view(tensor)
        self.tensors.append(tensor)
        self.views.append(view)
        return view

    def owns(self, view: Tensor) -> bool:
        """Whether it is one of the CPU views."""
        return any(view is own for own in self.views)

    def same_or_view(self, result: Tensor) -> Tensor | None:
        """The device tensor a result is, or a view of the one it is a view of; None if its memory is its own."""
        for tensor, view in zip(self.tensors, self.views, strict=True):
            if result is view:
                return tensor
        address = result.untyped_storage().data_ptr()
        for tensor in self.tensors if address else ():
            if tensor.untyped_storage().data_ptr() == address:
                return torch.as_strided(tensor, result.shape, result.stride(), result.storage_offset())
        return None

    def kernel(self, compute: Callable[[], Any], outputs: Any) -> Callable[[], None]:
        """What runs `compute` and writes its results to the device tensors `outputs`, now or later.

        It has pointers only: as on a device, memory that is given back is not kept for it.
        """
        targets = [_target(value) for value in leaves(outputs)]
        self.tensors.clear()

        def run() -> None:
            self._check_memory(targets)
            for target, value in zip(targets, leaves(compute()), strict=True):
                if target is not None and value is not None and not self.owns(value):
                    target.copy_(value)

        return run

    def _check_memory(self, targets: list[Tensor | None]) -> None:
        for view in (*self.views, *(target for target in targets if target is not None)):
            memory = view.untyped_storage()
            if memory.nbytes() and not runtime.is_device_memory(memory.data_ptr(), memory.nbytes()):
                raise RuntimeError(f"{self.name}: a replay uses device memory that was given back; keep the tensor")


def allocate(like: Tensor, device: torch.device) -> Tensor:
    """A device tensor for a result; contiguous, as torch_npu allocates what its operators return."""
    return torch.empty(like.shape, dtype=like.dtype, device=device)
