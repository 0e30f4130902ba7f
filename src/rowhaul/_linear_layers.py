"""Linear layers with ReLU inside a kernel, for a few dozen samples at a time that stay in the cache.

Weights are packed: sixteen columns lie side by side, input by input. One step multiplies some samples with
sixteen columns, all sums in registers; how many registers sixteen numbers take is LLVM's business.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

Floats = npt.NDArray[np.float32]

# Where a register holds sixteen numbers, sums of four samples are too few: each waits for the one before it.
_HAS_WIDE_REGISTERS = binding.get_host_cpu_features().get("avx512f", False)
ROWS, COLUMNS = 8 if _HAS_WIDE_REGISTERS else 4, 16  # of a step
FIELDS = 5  # of a layer: addresses of its weights and its bias, inputs, outputs, whether ReLU follows

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_COLUMNS, _LANES = ir.VectorType(_FLOAT, COLUMNS), ir.VectorType(_FLOAT, 4)
_BYTES = 4


def pack(weight: Floats) -> Floats:
    """Pack inputs x outputs; columns of zeros fill up the last sixteen."""
    inputs, outputs = weight.shape
    wide = np.zeros((inputs, padded(outputs)), np.float32)
    wide[:, :outputs] = weight
    return np.ascontiguousarray(wide.reshape(inputs, padded(outputs) // COLUMNS, COLUMNS).transpose(1, 0, 2))


def padded(size: int) -> int:
    """Round up to whole steps."""
    return -(-size // COLUMNS) * COLUMNS


@intrinsic
def _step(
    typing_context: Any, a: Any, stride: Any, weights: Any, inputs: Any, bias: Any, lowest: Any, out: Any
) -> Any:
    """Write ``max(a @ weights + bias, lowest)`` of a step's samples and columns, all by address.

    ``stride`` are the bytes from one sample to the next, in ``a`` and in ``out``.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, stride, weights, inputs, bias, lowest, out = arguments
        kind = ir.FunctionType(_COLUMNS, [_COLUMNS] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{COLUMNS}f32")

        def load(address: Any, kind: Any) -> Any:
            return builder.load(builder.inttoptr(address, kind.as_pointer()), align=_BYTES)

        def after(address: Any, count: Any, size: int) -> Any:
            return builder.add(address, builder.mul(count, _INT64(size)))

        def everywhere(values: Any, lane: int) -> Any:
            mask = ir.Constant(ir.VectorType(_INT32, COLUMNS), [lane] * COLUMNS)
            return builder.shuffle_vector(values, ir.Constant(values.type, ir.Undefined), mask)

        def single(value: Any) -> Any:
            return builder.insert_element(ir.Constant(_LANES, ir.Undefined), value, _INT32(0))

        def add_products(values: Any, lane: int, at: Any) -> None:
            some = load(at, _COLUMNS)
            for one, total in zip(values, sums, strict=True):
                builder.store(builder.call(fma, [everywhere(one, lane), some, builder.load(total)]), total)

        rows, targets = [a], [out]
        for _ in range(ROWS - 1):
            rows.append(builder.add(rows[-1], stride))
            targets.append(builder.add(targets[-1], stride))
        sums = [cgutils.alloca_once(builder, _COLUMNS) for _ in range(ROWS)]  # LLVM keeps them in registers
        for total in sums:
            builder.store(load(bias, _COLUMNS), total)
        fours = builder.lshr(inputs, _INT64(2))
        with cgutils.for_range(builder, fours, intp=_INT64) as loop:
            values = [load(after(row, loop.index, 4 * _BYTES), _LANES) for row in rows]
            at = after(weights, loop.index, 4 * COLUMNS * _BYTES)
            for lane in range(4):
                add_products(values, lane, builder.add(at, _INT64(lane * COLUMNS * _BYTES)))
        rest = builder.shl(fours, _INT64(2))
        with cgutils.for_range_slice(builder, rest, inputs, _INT64(1), intp=_INT64) as (number, _):
            values = [single(load(after(row, number, _BYTES), _FLOAT)) for row in rows]
            add_products(values, 0, after(weights, number, COLUMNS * _BYTES))
        least = everywhere(single(lowest), 0)
        for total, target in zip(sums, targets, strict=True):
            found = builder.load(total)
            # A comparison, since older LLVMs have no maximum for x86; what is not a number stays so.
            result = builder.select(builder.fcmp_ordered("<", found, least), least, found)
            builder.store(result, builder.inttoptr(target, _COLUMNS.as_pointer()), align=_BYTES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32, types.int64), generate


@register_jitable
def apply_layer(layer: Any, num_rows: int, stride: int, source: int, target: int) -> None:
    """Apply a layer to rows at an address; rows up to a whole step are read and written, too."""
    weights, bias, inputs, outputs = layer[0], layer[1], layer[2], layer[3]
    lowest = np.float32(0) if layer[4] else np.float32(-np.inf)
    for column in range(0, outputs, COLUMNS):
        packed = weights + 4 * column * inputs
        for row in range(0, num_rows, ROWS):
            _step(
                source + row * stride,
                stride,
                packed,
                inputs,
                bias + 4 * column,
                lowest,
                target + row * stride + 4 * column,
            )


@register_jitable
def apply_layers(layers: Any, num_rows: int, stride: int, source: int, other: int) -> Any:
    """Apply layers one after the other, from one of two places to the other; returns where the last ended."""
    for number in range(len(layers)):
        apply_layer(layers[number], num_rows, stride, source, other)
        source, other = other, source
    return source
