# SPDX-License-Identifier: Apache-2.0
"""The entry point torch calls at `import torch`: installs the kernels if this process is to be emulated."""

from __future__ import annotations

import atexit
import os
from importlib import import_module
from pathlib import Path

from npu_emulator import settings

_installed = False


def autoload() -> None:
    """Import torch_npu, put CPU kernels behind its operators, and see to the end of the process."""
    global _installed
    if _installed or not settings.enabled():
        return
    _installed = True
    import_module("torch_npu")  # registers the operators whose kernels are replaced

    from npu_emulator import aten, kernels, runtime, trace

    configured = settings.from_environment()
    aten.install()
    kernels.install()
    runtime.connect()
    atexit.register(runtime.disconnect)
    if configured.trace:
        name = configured.trace if runtime.is_main_process() else f"{configured.trace}.{os.getpid()}"
        atexit.register(trace.write, Path(name))
