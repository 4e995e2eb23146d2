# SPDX-License-Identifier: Apache-2.0
"""Runs compiled kernels on the threads that PyTorch computes with."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path

import torch

ParallelFn = Callable[[int, int, int], None]
"""Calls the C function at an address on so many threads, each with the same data: (function, data, num_threads)."""


@functools.cache
def parallel_region() -> ParallelFn:
    """Return what runs a C function on several threads; where no OpenMP runtime is found it runs on the calling one.

    The threads are those of the OpenMP runtime that PyTorch has loaded: a pool of our own would fight with it for the
    same cores. GCC's, Intel's and LLVM's runtimes all have the entry point `GOMP_parallel`.
    """
    region = _gomp_parallel()
    if region is None:
        return lambda function, data, num_threads: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)
    return lambda function, data, num_threads: region(function, data, num_threads, 0)


def has_threads() -> bool:
    """Return whether `parallel_region` uses more than one thread."""
    return _gomp_parallel() is not None


@functools.cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    folder = str(Path(torch.__file__).parent)
    loaded = set(re.findall(r" (/.*/lib(?:gomp|iomp|omp)[^/]*)$", maps, re.MULTILINE))
    for path in sorted(loaded, key=lambda path: (not path.startswith(folder), path)):
        try:
            region = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        region.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        region.restype = None
        found: Callable[[int, int, int, int], None] = region
        return found
    return None
