# SPDX-License-Identifier: Apache-2.0
"""The inner loop of a matmul with few rows, as LLVM IR: 4 rows times 3 columns of dot products in registers.

Twelve sums, three weights and one input fill the sixteen vector registers of AVX2. A compiled Python loop vectorises
too, but cannot ask for the weights of the next tile while it multiplies, and reading weights is what few rows wait for.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE_ROWS, TILE_COLUMNS = 4, 3
DEPTH_STEP = 16
"""Inputs of a dot product come in multiples of this: a cache line of fp32."""

_LANES = 8
_FLOAT, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_BYTE_POINTER = ir.IntType(8).as_pointer()


@intrinsic
def dot_tile(_context: Any, _rows: Any, _columns: Any, _out: Any, _depth: Any) -> Any:
    """Write `out[i][j] = dot(rows[i], columns[j])`, each over `depth` floats and always in the same order.

    Arguments are addresses: `rows` and `out` of each row, as tuples of `TILE_ROWS`; `columns` of `TILE_COLUMNS` vectors
    that lie one behind the other. `depth` is a multiple of `DEPTH_STEP`, > 0.
    """
    addresses = types.UniTuple(types.intp, TILE_ROWS)

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        rows, columns, out, depth = args
        rows, out = cgutils.unpack_tuple(builder, rows), cgutils.unpack_tuple(builder, out)
        stride = builder.mul(depth, _I64(4))
        columns = [builder.add(columns, builder.mul(stride, _I64(j))) for j in range(TILE_COLUMNS)]
        sums = _accumulate(builder, rows, columns, depth, builder.mul(stride, _I64(TILE_COLUMNS)))
        for i, address in enumerate(out):
            for j in range(TILE_COLUMNS):
                total = _add_lanes(builder, sums[i][j])
                builder.store(total, builder.inttoptr(builder.add(address, _I64(4 * j)), _FLOAT.as_pointer()))
        return _context.get_dummy_value()

    return types.void(addresses, types.intp, addresses, types.intp), generate


def _accumulate(builder: ir.IRBuilder, rows: Any, columns: Any, depth: Any, ahead: Any) -> list[list[Any]]:
    """Generate the loop over the depth; returns the vectors of partial sums by row and column."""
    entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    position = builder.phi(_I64)
    position.add_incoming(_I64(0), entry)
    carried = [[builder.phi(_VECTOR) for _ in columns] for _ in rows]
    offset = builder.mul(position, _I64(4))
    for column in columns:
        _prefetch(builder, builder.add(builder.add(column, ahead), offset))
    sums: list[list[Any]] = [list(row) for row in carried]
    for part in range(0, DEPTH_STEP, _LANES):
        here = builder.add(offset, _I64(4 * part))
        weights = [_load(builder, builder.add(column, here)) for column in columns]
        for i, row in enumerate(rows):
            inputs = _load(builder, builder.add(row, here))
            for j, weight in enumerate(weights):
                product = builder.fmul(inputs, weight, flags=["contract"])  # becomes a fused multiply-add
                sums[i][j] = builder.fadd(product, sums[i][j], flags=["contract"])
    following = builder.add(position, _I64(DEPTH_STEP))
    position.add_incoming(following, loop)
    for phis, values in zip(carried, sums, strict=True):
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(ir.Constant(_VECTOR, [0.0] * _LANES), entry)
            phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
    builder.position_at_end(done)
    return sums


def _load(builder: ir.IRBuilder, address: Any) -> Any:
    load = builder.load(builder.inttoptr(address, _VECTOR.as_pointer()))
    load.align = 4
    return load


def _prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Ask for a cache line to be read; an address that is not mapped is ignored."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _I32, _I32, _I32])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE_POINTER], kind)
    builder.call(prefetch, [builder.inttoptr(address, _BYTE_POINTER), _I32(0), _I32(0), _I32(1)])  # read, once, data


def _add_lanes(builder: ir.IRBuilder, vector: Any) -> Any:
    """Return the sum of a vector's lanes, folded in halves."""
    width = _LANES // 2
    while width:
        order = ir.Constant(ir.VectorType(_I32, _LANES), [(lane + width) % _LANES for lane in range(_LANES)])
        vector = builder.fadd(vector, builder.shuffle_vector(vector, ir.Constant(_VECTOR, ir.Undefined), order))
        width //= 2
    return builder.extract_element(vector, _I32(0))
