# SPDX-License-Identifier: Apache-2.0
"""What opening a device says when something is missing."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from adaflash.errors import BackendError
from adaflash_ascend import runtime
from adaflash_ascend.required_ops import REQUIRED_OPS


def present(monkeypatch: pytest.MonkeyPatch, num_devices: int = 1) -> None:
    """Make torch_npu look installed, with all its operators."""
    monkeypatch.setattr(runtime, "import_module", ModuleType)
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace(device_count=lambda: num_devices))
    monkeypatch.setattr(torch, "device", lambda name: SimpleNamespace(index=int(name.partition(":")[2] or 0)))
    monkeypatch.setattr(torch.ops, "npu", SimpleNamespace(**dict.fromkeys(REQUIRED_OPS)), raising=False)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'torch_npu'", name="torch_npu"), r'not installed: pip install "adaflash'),
        (
            ImportError("libascendcl.so: cannot open shared object file: No such file or directory"),
            r"needs CANN, whose libascendcl\.so is not found: .*source .*set_env\.sh",
        ),
        (OSError("libhccl.so: cannot open shared object file"), r"whose libhccl\.so is not found"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), "cannot be loaded: No module named 'yaml'"),
        (ImportError("undefined symbol: _ZN3c10"), "cannot be loaded: undefined symbol: _ZN3c10"),
    ],
)
def test_a_library_that_cannot_be_loaded_is_named(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> ModuleType:
        assert name == "torch_npu"
        raise error

    monkeypatch.setattr(runtime, "import_module", refuse)
    with pytest.raises(BackendError, match=f"device='npu:0'.*{message}"):
        runtime.open_device("npu:0")


def test_a_device_that_is_there_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, num_devices=2)
    runtime.open_device("npu:1")


@pytest.mark.parametrize(("device", "num_devices"), [("npu:0", 0), ("npu:2", 2), ("npu", 0)])
def test_a_device_that_is_not_there_is_refused(device: str, num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, num_devices)
    with pytest.raises(BackendError, match=f"device='{device}' is not there: CANN sees {num_devices} NPUs"):
        runtime.open_device(device)


def test_an_operator_that_torch_npu_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch)
    delattr(torch.ops.npu, "npu_swiglu")
    with pytest.raises(BackendError, match="torch_npu lacks npu_swiglu: it is too old"):
        runtime.open_device("npu:0")
