# SPDX-License-Identifier: Apache-2.0
"""Linear layers of the `cpu` backend: fp32 weights are read once, as they lie, by the threads of PyTorch."""

from __future__ import annotations

import ctypes

import torch
from numba import carray
from torch import Tensor

from adaflash.ops.backend import LinearFn
from adaflash.ops.compiled import compiled_callback, fetch_and_add, longs
from adaflash.ops.dot_tile import DEPTH_STEP, TILE_COLUMNS, TILE_ROWS, dot_tile
from adaflash.ops.openmp import has_threads, parallel_region

# Inputs that are multiplied by all columns of a chunk before the next ones: they stay in a core's second-level cache.
_INPUT_BYTES = 128 * 1024
# More would even out threads that are held up, but weights at the beginning of a chunk are waited for.
_CHUNKS_PER_THREAD = 2
_NEXT_CHUNK = 7  # index in the task


class _Task(ctypes.Structure):
    """What the threads of a matmul share; they take chunks of columns until none is left."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("x", "weight", "out", "num_rows", "num_columns", "depth", "chunk_columns", "next_chunk")
    ]


@compiled_callback("void(intp)")
def _multiply(task: int) -> None:
    """Compute `out[r, c] = dot(x[r], weight[c])` for the chunks this thread gets hold of; see `_Task`."""
    fields = carray(longs(task), (_NEXT_CHUNK + 1,))
    x, weight, out = fields[0], fields[1], fields[2]
    num_rows, num_columns, depth, chunk_columns = fields[3], fields[4], fields[5], fields[6]
    last_row = num_rows - 1
    block_rows = max(TILE_ROWS, _INPUT_BYTES // (4 * depth) // TILE_ROWS * TILE_ROWS)
    while True:
        first = fetch_and_add(task + 8 * _NEXT_CHUNK, 1) * chunk_columns
        if first >= num_columns:
            return
        for block in range(0, num_rows, block_rows):
            for start in range(first, min(first + chunk_columns, num_columns), TILE_COLUMNS):
                column = min(start, num_columns - TILE_COLUMNS)  # the last tile may overlap the one before it
                for row in range(block, min(block + block_rows, num_rows), TILE_ROWS):
                    r0, r1, r2, r3 = row, min(row + 1, last_row), min(row + 2, last_row), min(row + 3, last_row)
                    inputs = (x + 4 * depth * r0, x + 4 * depth * r1, x + 4 * depth * r2, x + 4 * depth * r3)
                    to = out + 4 * column
                    width = 4 * num_columns
                    results = (to + width * r0, to + width * r1, to + width * r2, to + width * r3)
                    dot_tile(inputs, weight + 4 * depth * column, results, depth)


def compiled_linear(weight: Tensor, bias: Tensor | None) -> LinearFn | None:
    """Return `x -> x @ weight.T + bias` for x [..., K] fp32, or None where the kernel does not take the weight.

    A row's result does not depend on how many rows there are. The weight is not copied; it has no gradients.

    Args:
        weight: [N, K], contiguous.
        bias: [N], or None.
    """
    parallel = parallel_region()
    num_columns, depth = weight.shape
    fits = weight.dtype is torch.float32 and weight.is_contiguous() and depth > 0 and depth % DEPTH_STEP == 0
    if not has_threads() or not fits or num_columns < TILE_COLUMNS:
        return None

    def linear(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or x.shape[-1] != depth:
            raise ValueError(f"x is {list(x.shape)} {x.dtype}: must be [..., {depth}] torch.float32")
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], num_columns))
        num_rows, num_threads = x.numel() // depth, torch.get_num_threads()
        chunk = max(1, num_columns // (_CHUNKS_PER_THREAD * num_threads * TILE_COLUMNS)) * TILE_COLUMNS
        addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        task = _Task(*addresses, num_rows, num_columns, depth, chunk, 0)
        if num_rows:
            parallel(_multiply.address, ctypes.addressof(task), num_threads)
        return out if bias is None else out.add_(bias)

    return linear
