# SPDX-License-Identifier: Apache-2.0
"""Puts Python functions behind operators on torch's dispatch keys, in all threads and until the process ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DEVICE_KEY = "PrivateUse1"

_libraries: dict[tuple[str, str], Any] = {}  # a registration ends with its library


def register(name: str, kernel: Callable[..., Any], key: str = DEVICE_KEY, with_keys: bool = False) -> None:
    """Make `kernel` what torch calls for `namespace::operator.overload` on `key`.

    Args:
        name: The operator.
        kernel: Takes what the schema says; after the dispatch keys, if `with_keys`.
        key: The dispatch key.
        with_keys: Whether it gets the dispatch keys, to call another kernel with.
    """
    namespace, _, operator = name.partition("::")
    if (namespace, key) not in _libraries:
        _libraries[namespace, key] = torch.library.Library(namespace, "IMPL", key)  # type: ignore[no-untyped-call]
    _libraries[namespace, key].impl(operator, kernel, key, with_keyset=with_keys)


def own_kernel(name: str) -> Any:
    """torch_npu's kernel, which stays callable when another one is registered later."""
    return torch.library.get_kernel(name, DEVICE_KEY)
