# SPDX-License-Identifier: Apache-2.0
"""The `cpu` backend: reference bodies, with what PyTorch does faster on a CPU overridden."""

from __future__ import annotations

from adaflash.ops.backend import Backend


class CpuBackend(Backend):
    """CPU backend."""

    name = "cpu"
