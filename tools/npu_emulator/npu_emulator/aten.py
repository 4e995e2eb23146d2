# SPDX-License-Identifier: Apache-2.0
"""Puts CPU kernels behind the aten operators that torch_npu registers for its devices."""

from __future__ import annotations

import torch

from npu_emulator import composites, copies
from npu_emulator.launch import Operator
from npu_emulator.limits import FLOATS
from npu_emulator.registration import DEVICE_KEY, register

# Operators that allocate, alias or ask: torch_npu's own code needs no kernel for them.
_OWN_CODE = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "resize_", "resize_as_"),
    *("_resize_output_", "record_stream", "_pin_memory", "pin_memory", "is_pinned", "_local_scalar_dense", "is_set_to"),
    *("_has_same_storage_numel", "view", "as_strided", "_reshape_alias", "unfold", "clone", "contiguous"),
    *("storage_offset", "_copy_from", "_copy_from_and_resize"),
}

# Operators whose result, or the size of it, the host waits for.
_WAITS = {
    *("nonzero", "masked_select", "equal", "bincount", "repeat_interleave.Tensor", "repeat_interleave.self_Tensor"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
}

# Operators that take indices.
_INDEX = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}

# The cube unit multiplies these dtypes. Source: aclnnMatmul, as op-plugin calls it.
_MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "addmv", "mv", "dot", "addbmm"}


def _overload(name: str) -> torch._ops.OpOverload:
    base, _, overload = name.removeprefix("aten::").partition(".")
    found: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, base), overload or "default")
    return found


def _returns_views(op: torch._ops.OpOverload) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in op._schema.returns)


def names() -> list[str]:
    """The operators that get a kernel: torch_npu's, but for its own code, if the CPU has one."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(DEVICE_KEY)
    own = _OWN_CODE | copies.OPERATORS
    return sorted(
        name
        for name in registered
        if name.startswith("aten::")
        and name.removeprefix("aten::").split(".")[0] not in own
        and torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
        and not _returns_views(_overload(name))
    )


def install() -> None:
    """Register the kernels; they hold in every thread."""
    copies.install()
    composites.install()
    for name in names():
        full = name.removeprefix("aten::")
        base = full.split(".")[0]
        dtypes = FLOATS if base.rstrip("_") in _MATRIX_PRODUCTS else None
        kernel = Operator(_overload(name), bool({base, full} & _WAITS), base in _INDEX, dtypes)
        register(name, kernel)
