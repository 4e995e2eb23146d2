# SPDX-License-Identifier: Apache-2.0
"""Finds backends by the entry-point group `adaflash.backends` and picks one; nothing is detected at import."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from adaflash.config import suggest
from adaflash.errors import BackendError
from adaflash.ops.backend import Backend

GROUP = "adaflash.backends"
AUTO_ORDER = ("npu", "cuda", "cpu")


def installed_backends() -> dict[str, EntryPoint]:
    """Return the registered backends by device name, without importing them."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def load_backend(device: str) -> Backend:
    """Return the backend for `device`; `auto` takes the first of npu, cuda, cpu that loads.

    Raises:
        BackendError: The device is unknown, or it cannot run here; names what is installed and what is missing.
    """
    installed = installed_backends()
    if device != "auto":
        return _load(device, installed)
    failures = []
    for name in AUTO_ORDER:
        if name in installed:
            try:
                return _load(name, installed)
            except BackendError as error:
                failures.append(str(error))
    raise BackendError("no backend can run here: " + "; ".join(failures or ["none is installed"]))


def _load(device: str, installed: dict[str, EntryPoint]) -> Backend:
    if device not in installed:
        names = ", ".join(sorted(installed)) or "none"
        hint = "" if device in AUTO_ORDER else suggest(device, installed)
        raise BackendError(f"device={device!r} is not available: installed backends are {names}{hint}")
    try:
        backend_class = installed[device].load()
    except ImportError as error:
        raise BackendError(f"device={device!r} cannot be loaded: {error}") from error
    backend = backend_class()
    assert isinstance(backend, Backend), f"entry point {device} must name a subclass of Backend"
    return backend
