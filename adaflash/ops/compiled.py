# SPDX-License-Identifier: Apache-2.0
"""What compiled kernels are written with: a typed decorator, pointers to addresses, and an exponential that vectorises.

Kernels take addresses of contiguous memory, since converting a tensor to an array costs more than most of them run;
their callers check shapes and dtypes. Compiled by numba at first import, then cached on disk.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, Protocol

import numpy as np
from numba import cfunc, config, njit, types
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Kernel = Callable[P, None]

FAST = frozenset({"reassoc", "contract", "nsz", "arcp"})
"""Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning."""

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(1.5 * 2**23)  # added and subtracted, rounds to an integer, which is then in the low bits
_MIN_EXPONENT, _MAX_EXPONENT, _INFINITY = np.float32(-87.0), np.float32(88.0), np.float32(np.inf)


def compiled(signature: str, fastmath: frozenset[str] = frozenset()) -> Callable[[Kernel[P]], Kernel[P]]:
    """Compile a kernel for one signature, with LLVM's fast-math flags `fastmath`."""
    options = {"fastmath": set(fastmath), "error_model": "numpy"}

    def compile_kernel(kernel: Kernel[P]) -> Kernel[P]:
        _name_by_sources(kernel)
        decorated = _cached(lambda cache: njit(signature, cache=cache, **options)(kernel))
        if decorated.stats.cache_path is not None:
            _check_folder(decorated.stats.cache_path)
        typed: Kernel[P] = decorated
        return typed

    return compile_kernel


class Callback(Protocol):
    """A kernel with the calling convention of C.

    Attributes:
        address: Of the function.
    """

    address: int


def compiled_callback(signature: str) -> Callable[[Kernel[P]], Callback]:
    """Compile a kernel that C code calls by its address."""

    def compile_kernel(kernel: Kernel[P]) -> Callback:
        _name_by_sources(kernel)
        callback: Callback = _cached(lambda cache: cfunc(signature, cache=cache, error_model="numpy")(kernel))
        return callback

    return compile_kernel


def _name_by_sources(kernel: Callable[..., Any]) -> None:
    """Give the kernel a name of its own in the cache for what kernels are made of: numba looks at their file alone."""
    kernel.__qualname__ = f"{kernel.__qualname__}_{_sources_digest()}"


@functools.cache
def _sources_digest() -> str:
    sources = [Path(__file__).with_name(name).read_bytes() for name in ("compiled.py", "dot_tile.py")]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:8]


def _cached(compile_with: Callable[[bool], Any]) -> Any:
    """Compile with a cache on disk where one can be had."""
    try:
        return compile_with(True)
    except RuntimeError as error:  # What numba raises when neither the package nor the home can be written.
        if "cannot cache function" not in str(error):
            raise
        _warn_uncached("no folder can be written")
    except OSError as error:  # The folder can be written, the kernel's file cannot: a full disk, another owner.
        _warn_uncached(str(error.strerror))
    return compile_with(False)


def _check_folder(used: str) -> None:
    """Say so when numba passed over the folder it was given, which it does without a word."""
    if config.CACHE_DIR and not Path(used).is_relative_to(config.CACHE_DIR):
        _warn_elsewhere(config.CACHE_DIR)


@functools.cache  # One warning, not one for each kernel.
def _warn_uncached(reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be cached and are compiled at every start: "
        "set NUMBA_CACHE_DIR to a folder that can be written reason=%r",
        reason,
    )


@functools.cache
def _warn_elsewhere(folder: str) -> None:
    logger.warning(
        "NUMBA_CACHE_DIR cannot be written and has no effect: set it to a folder that can be, or unset it folder=%r",
        folder,
    )


def _pointer(dtype: Any) -> Any:
    @intrinsic
    def pointer(_context: Any, _address: Any) -> Any:
        pointer_type = types.CPointer(dtype)

        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(pointer_type))

        return pointer_type(types.intp), generate

    return pointer


def _reinterpret(source: Any, target: Any) -> Any:
    @intrinsic
    def reinterpret(_context: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), generate

    return reinterpret


# In kernels: the address of an array as a pointer, for `numba.carray`; fp32 and its int32 bits.
floats, ints, longs = _pointer(types.float32), _pointer(types.int32), _pointer(types.int64)
float_of_bits, bits_of_float = _reinterpret(types.int32, types.float32), _reinterpret(types.float32, types.int32)


@intrinsic
def fetch_and_add(_context: Any, _address: Any, _amount: Any) -> Any:
    """In kernels: add to the int64 at an address, atomically, and return what it was."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, amount = args
        pointer = builder.inttoptr(address, amount.type.as_pointer())
        return builder.atomic_rmw("add", pointer, amount, "monotonic")

    return types.int64(types.intp, types.int64), generate


@njit(fastmath={"contract"})
def exp(x: Any) -> Any:
    """Return e^x within 2 ulp, without a call, so that loops over it vectorise; 0 below -87, infinity above 88.

    x = n ln 2 + r, and e^r by a polynomial of degree 6 (Cephes' expf). NaN stays NaN.
    """
    given = x
    x = _MAX_EXPONENT if x > _MAX_EXPONENT else x
    x = _MIN_EXPONENT if x < _MIN_EXPONENT else x
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    result = p * float_of_bits((bits_of_float(shifted) << np.int32(23)) + np.int32(127 << 23))
    result = _INFINITY if given > _MAX_EXPONENT else result
    return np.float32(0) if given < _MIN_EXPONENT else result
