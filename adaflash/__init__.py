# SPDX-License-Identifier: Apache-2.0
"""AdaFlash: LLM serving that is losslessly faster by speculative decoding, and gets faster while it serves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from adaflash.config import EngineConfig, ServerConfig
from adaflash.errors import AdaFlashError
from adaflash.request import ChatMessage, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from adaflash.engine.async_engine import AsyncEngine
    from adaflash.engine.engine import Engine

__version__ = "0.1.0"

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
