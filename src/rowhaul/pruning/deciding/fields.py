"""Single numbers by address, for hot loops over entries.

An array made inside a kernel, or handed to another function there, costs more than the number that is read
from it: Numba counts references to it each time. A number by its address costs a move.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def _load(kind: Any) -> Any:
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            return builder.load(pointer, align=4)

        return kind(types.int64), generate

    return intrinsic(load)


def _store(kind: Any) -> Any:
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            builder.store(arguments[1], pointer, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, kind), generate

    return intrinsic(store)


load_int32, load_float32 = _load(types.int32), _load(types.float32)
store_int32, store_float32 = _store(types.int32), _store(types.float32)
