# SPDX-License-Identifier: Apache-2.0
"""AdaFlash: LLM serving that is losslessly faster by speculative decoding, and gets faster while it serves."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from adaflash.config import EngineConfig, ServerConfig
from adaflash.errors import AdaFlashError
from adaflash.request import ChatMessage, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from adaflash.engine.async_engine import AsyncEngine
    from adaflash.engine.engine import Engine

__version__ = "0.1.0"

# By default a thread that waits for the others of a matmul spins for milliseconds. Where other processes want the same
# cores, that uses up its share of them and serving becomes several times slower. Read when PyTorch loads GCC's OpenMP.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__all__ = [
    "AdaFlashError",
    "AsyncEngine",
    "ChatMessage",
    "Engine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "ServerConfig",
    "__version__",
]

_LAZY = {"Engine": "adaflash.engine.engine", "AsyncEngine": "adaflash.engine.async_engine"}


def __getattr__(name: str) -> object:
    """Import the engine on first use, so that `import adaflash` stays light."""
    if name not in _LAZY:
        raise AttributeError(f"module 'adaflash' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
