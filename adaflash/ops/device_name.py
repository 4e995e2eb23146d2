# SPDX-License-Identifier: Apache-2.0
"""What the machine calls its processor or accelerator."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """Return the name of the processor or accelerator as the system reports it."""
    return cpu_model() if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def cpu_model() -> str:
    """Return the processor's name as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
