# SPDX-License-Identifier: Apache-2.0
"""The C runtime seen from Python: what becomes of a kernel on a stream, and the kernels that run later."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

_library = ctypes.CDLL("libascendcl.so")
_special = ctypes.c_int.in_dll(_library, "npu_emulator_special")
_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_uint64)

for _name, _result, _arguments in (
    ("aclGetRecentErrMsg", ctypes.c_char_p, []),
    ("aclrtSynchronizeStream", ctypes.c_int, [ctypes.c_void_p]),
    ("npu_emulator_mode", ctypes.c_int, [ctypes.c_void_p]),
    ("npu_emulator_launch", ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p]),
    ("npu_emulator_set_callbacks", None, [ctypes.c_void_p, ctypes.c_void_p]),
    ("npu_emulator_set_error", None, [ctypes.c_char_p]),
    ("npu_emulator_is_device_memory", ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t]),
    ("npu_emulator_arm", None, []),
    ("npu_emulator_disarm", ctypes.c_char_p, []),
):
    _function = getattr(_library, _name)
    _function.restype, _function.argtypes = _result, _arguments


class Mode(IntEnum):
    """What becomes of a kernel that is launched on a stream."""

    RUN = 0
    CAPTURE = 1
    UPDATE = 2
    QUEUE = 3


class DeviceError(RuntimeError):
    """The emulated runtime refused a call; the text begins with its error code."""

    def __init__(self, code: int) -> None:
        text = _library.aclGetRecentErrMsg().decode(errors="replace")
        super().__init__(f"error code {code}: {text}")


Kernel = Callable[[], None]

_kernels: dict[int, Kernel] = {}
_numbers = itertools.count(1)
_names: dict[str, bytes] = {}  # the runtime keeps pointers to these


def _run(number: int) -> int:
    try:
        with torch.inference_mode():  # a kernel may write into tensors made in this mode, whoever replays it
            _kernels[number]()
    except Exception as error:  # noqa: BLE001 - the border to C: the runtime reports it at the stream's next call
        _library.npu_emulator_set_error(f"{type(error).__name__}: {error}".encode())
        return 1
    return 0


def _release(number: int) -> None:
    _kernels.pop(number, None)


_callbacks = (_RUN(_run), _RELEASE(_release))


def connect() -> None:
    """Let the runtime call kernels; to be called once."""
    _library.npu_emulator_set_callbacks(*(ctypes.cast(callback, ctypes.c_void_p) for callback in _callbacks))


def disconnect() -> None:
    """Take the kernels away from the runtime, which lives longer than Python does."""
    _library.npu_emulator_set_callbacks(None, None)


def npu() -> Any:
    """The module torch.npu, which torch_npu adds to torch."""
    return vars(torch)["npu"]


def stream_handle(device: int) -> int:
    """The runtime's handle of this thread's current stream on `device`."""
    handle: int = npu().current_stream(device).npu_stream
    return handle


def mode(device: int) -> tuple[Mode, int]:
    """The mode of the current stream on `device`, and its handle (0, unknown, while every stream just runs)."""
    if not _special.value:
        return Mode.RUN, 0
    handle = stream_handle(device)
    return Mode(_library.npu_emulator_mode(handle)), handle


def launch(handle: int, name: str, kernel: Kernel) -> None:
    """Hand a kernel to a stream that is captured, updated or busy.

    Raises:
        DeviceError: It does not fit the task group being updated, or something that ran at once failed.
    """
    number = next(_numbers)
    _kernels[number] = kernel
    encoded = _names.setdefault(name, name.encode())
    if code := _library.npu_emulator_launch(handle, number, encoded):
        raise DeviceError(code)


def host_sync(device: int) -> None:
    """Wait for the current stream, as an operator does that hands values to the host.

    Raises:
        DeviceError: The stream is being captured, or never gets done.
    """
    if code := _library.aclrtSynchronizeStream(stream_handle(device)):
        raise DeviceError(code)


def is_device_memory(address: int, num_bytes: int) -> bool:
    """Whether these bytes are allocated on a device now."""
    return bool(_library.npu_emulator_is_device_memory(address, num_bytes))


def host_code(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Run torch_npu's own code of an operator; returns its result and the aclnn operators it launched."""
    _library.npu_emulator_arm()
    try:
        result = call()
    finally:
        called = _library.npu_emulator_disarm().decode()
    return result, called.split(",") if called else []


def library() -> ctypes.CDLL:
    """The loaded runtime."""
    return _library


def is_main_process() -> bool:
    """Whether this is the process that `npu_emulator run` became, not a child of it."""
    return os.environ.get("NPU_EMULATOR_PID") in (None, str(os.getpid()))
