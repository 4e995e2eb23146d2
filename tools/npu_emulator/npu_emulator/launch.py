# SPDX-License-Identifier: Apache-2.0
"""Runs one operator on CPU views: at once, or later, when its stream is captured, updated or busy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from npu_emulator import rng, runtime, trace
from npu_emulator.limits import require_dtype
from npu_emulator.runtime import Mode
from npu_emulator.views import Operands, allocate, host_view, is_device, leaves, transform

_META = torch.device("meta")


class Operator:
    """An aten operator whose CPU kernel stands in for the device's.

    Args:
        op: The overload.
        waits: Whether the host waits for the result, so that it cannot be captured.
        indexes: Whether it takes indices: those on the host are copied, and for a mask the host waits.
        dtypes: What its operands may be, where the device takes less than the CPU.
    """

    def __init__(
        self,
        op: torch._ops.OpOverload,
        waits: bool,
        indexes: bool,
        dtypes: Collection[torch.dtype] | None,
    ) -> None:
        schema = op._schema
        self.op = op
        self.name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        self.waits = waits
        self.indexes = indexes
        self.dtypes = dtypes
        self.outs = [argument.name for argument in schema.arguments if argument.is_out]
        self.takes_generator = any(argument.name == "generator" for argument in schema.arguments)
        self.seeded = torch.Tag.nondeterministic_seeded in op.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The device kernel: what torch calls for tensors on a device."""
        operands = Operands(self.name)
        if self.indexes:
            args = _with_device_indices(*args)
        outs = [kwargs.pop(name) for name in self.outs]
        generator = kwargs.pop("generator", None) if self.takes_generator else None
        kwargs.pop("pin_memory", None)
        host_args, host_kwargs = self._host_arguments(operands, args, kwargs)
        for operand in operands.tensors if self.dtypes else ():
            require_dtype(self.name, "operands", operand, self.dtypes or ())
        device = operands.device or (outs[0].device if outs else torch.device("npu", runtime.npu().current_device()))
        index = device.index or 0
        if (self.waits and kwargs.get("output_size") is None) or (self.indexes and _waits_for_mask(args)):
            runtime.host_sync(index)
        mode, stream = runtime.mode(index)
        trace.count_op(self.name, mode is Mode.CAPTURE)

        out_dtypes = [out.dtype for out in outs]

        def compute() -> Any:
            return self._compute(host_args, host_kwargs, out_dtypes, device, generator)

        if mode is Mode.RUN:
            return self._place(compute(), operands, outs, device)
        shapes = self._shapes(host_args, host_kwargs, outs, operands)
        result = self._reserve(shapes, operands, outs, device)
        runtime.launch(stream, self.name, operands.kernel(compute, result))
        return result

    def _host_arguments(self, operands: Operands, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        return transform(args, operands.add), {key: transform(value, operands.add) for key, value in kwargs.items()}

    def _compute(
        self,
        args: list[Any],
        kwargs: dict[str, Any],
        out_dtypes: list[torch.dtype],
        device: torch.device,
        generator: torch.Generator | None,
    ) -> Any:
        """The CPU kernel's result; `out` arguments get tensors of their own, so that they may alias an input."""
        named = {name: torch.empty(0, dtype=dtype) for name, dtype in zip(self.outs, out_dtypes, strict=True)}
        if self.takes_generator:
            return self.op(*args, **kwargs, **named, generator=rng.host_generator(device, generator))
        if self.seeded:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(rng.host_generator(device, None).initial_seed())
                return self.op(*args, **kwargs, **named)
        return self.op(*args, **kwargs, **named)

    def _place(self, result: Any, operands: Operands, outs: list[Tensor], device: torch.device) -> Any:
        """Device tensors for what was computed."""
        if outs:
            for value, out in zip(leaves(result), outs, strict=True):
                if out.shape != value.shape:
                    out.resize_(value.shape)
                host_view(out).copy_(value)
            return outs[0] if len(outs) == 1 else tuple(outs)

        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            known = operands.same_or_view(value)
            if known is not None:
                return known
            target = allocate(value, device)
            host_view(target).copy_(value)
            return target

        return _like(result, transform(result, place))

    def _reserve(self, shapes: Any, operands: Operands, outs: list[Tensor], device: torch.device) -> Any:
        """Device tensors for what will be computed."""
        if outs:
            for value, out in zip(leaves(shapes), outs, strict=True):
                if out.shape != value.shape:
                    out.resize_(value.shape)
            return outs[0] if len(outs) == 1 else tuple(outs)
        return _like(shapes, transform(shapes, lambda value: _reserve_one(value, operands, device)))

    def _shapes(self, args: list[Any], kwargs: dict[str, Any], outs: list[Tensor], operands: Operands) -> Any:
        """The result on tensors without values; where it is one of the arguments, the argument's CPU view."""
        replaced: dict[int, Tensor] = {}
        stand_ins: list[Tensor] = []  # keeps their ids

        def infer(device: torch.device) -> Any:
            def stand_in(value: Any) -> Any:
                if not isinstance(value, Tensor) or not operands.owns(value):
                    return device if isinstance(value, torch.device) else value
                other = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).zero_()
                replaced[id(other)] = value
                stand_ins.append(other)
                return other

            named = {key: transform(value, stand_in) for key, value in kwargs.items()}
            for name, out in zip(self.outs, outs, strict=True):
                named[name] = torch.empty(0, dtype=out.dtype, device=device)
            return self.op(*transform(args, stand_in), **named)

        try:
            result = infer(_META)
        except NotImplementedError:  # there is no meta kernel; zeros are good for any operator, indices too
            result = infer(torch.device("cpu"))
        return _like(result, transform(result, lambda value: replaced.get(id(value), value)))


def _with_device_indices(tensor: Tensor, indices: Any, *others: Any) -> tuple[Any, ...]:
    """The arguments with every index on the tensor's device, where torch_npu copies those of the host."""
    return tensor, [None if index is None else index.to(tensor.device) for index in indices], *others


def _waits_for_mask(args: Any) -> bool:
    """Whether torch_npu turns a mask into indices on the host; it fills a mask with one host value without that."""
    _, indices, *value = args
    masks = [i for i in indices if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
    filled = value and value[0].numel() == 1 and not is_device(value[0])
    return bool(masks) and not filled


def _reserve_one(value: Any, operands: Operands, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    known = operands.same_or_view(value) if operands.owns(value) else None
    return allocate(value, device) if known is None else known


def _like(result: Any, values: Any) -> Any:
    return tuple(values) if isinstance(result, tuple) else values


def launch_or_run(name: str, device: int, kernel: Callable[[], None]) -> None:
    """Count a call of an operator, and run its kernel at once or hand it to the current stream."""
    mode, stream = runtime.mode(device)
    trace.count_op(name, mode is Mode.CAPTURE)
    if mode is Mode.RUN:
        kernel()
    else:
        runtime.launch(stream, name, kernel)
