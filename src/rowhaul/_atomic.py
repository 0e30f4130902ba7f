"""Atomic 32-bit numbers by address, for threads that share an array of them without a lock."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_NUMBER = ir.IntType(32)


@intrinsic
def load32(typing_context, address):
    """Read a number; nothing later is read before it."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _NUMBER.as_pointer())
        return builder.load_atomic(pointer, "acquire", 4)

    return types.int32(types.int64), generate


@intrinsic
def exchange32(typing_context, address, expected, replacement):
    """Replace a number if it is the expected one; says whether it was. Orders all before and after it."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _NUMBER.as_pointer())
        pair = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "monotonic")
        builder.fence("seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int32, types.int32), generate
