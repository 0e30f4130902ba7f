"""Bytes by address, for kernels that look at text.

Numba counts references to an array at every call it is passed to, which would cost more than reading a
field does. So the text kernels pass plain addresses (uint64) to each other. The caller keeps the memory
alive, and readable for eight bytes past its end.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def _load(result: Any) -> Any:
    def load(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(arguments[0], context.get_value_type(result).as_pointer())
            return builder.load(pointer, align=1)

        return result(types.uint64), generate

    return intrinsic(load)


load8 = _load(types.uint8)  # one byte
load32 = _load(types.uint32)  # four bytes, the first the lowest
load64 = _load(types.uint64)  # eight bytes, the first the lowest


@intrinsic
def store8(typing_context, address, byte):  # type: ignore[no-untyped-def]
    """Write one byte."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.uint8).as_pointer())
        builder.store(arguments[1], pointer)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint8), generate
