# SPDX-License-Identifier: Apache-2.0
"""Opens a device: loads torch_npu, and says in words what is missing when that fails."""

from __future__ import annotations

import re
from importlib import import_module

import torch

from adaflash.errors import BackendError
from adaflash_ascend.required_ops import REQUIRED_OPS

INSTALL = 'pip install "adaflash[ascend]"'
SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"

_MISSING_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")


def open_device(device: str) -> None:
    """Load torch_npu and make sure that `device` and the operators of `REQUIRED_OPS` are there.

    Raises:
        BackendError: Says what is missing and how to get it.
    """
    try:
        import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise BackendError(_explain(device, error)) from error
    num_devices = torch.get_device_module("npu").device_count()
    index = torch.device(device).index or 0
    if index >= num_devices:
        raise BackendError(
            f"device={device!r} is not there: CANN sees {num_devices} NPUs; check `npu-smi info` and "
            "ASCEND_RT_VISIBLE_DEVICES, which selects among them"
        )
    missing = [name for name in REQUIRED_OPS if not hasattr(torch.ops.npu, name.partition(".")[0])]
    if missing:
        raise BackendError(f"device={device!r}: torch_npu lacks {', '.join(missing)}: it is too old, {INSTALL}")


def _explain(device: str, error: ImportError | OSError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch_npu":
        return f"device={device!r} needs torch_npu, which is not installed: {INSTALL}"
    library = _MISSING_LIBRARY.search(str(error))
    if library is not None:
        return (
            f"device={device!r} needs CANN, whose {library[1]} is not found: install the CANN toolkit, "
            f"and in the shell that starts AdaFlash: {SET_ENV}"
        )
    return f"device={device!r}: torch_npu cannot be loaded: {error}"
