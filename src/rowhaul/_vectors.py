"""Several numbers at a time inside a kernel, by address.

Whether LLVM turns a loop over values into vector instructions depends on what it can prove of the memory
behind: of rows that are found by address it proves little, and a step with square roots stays scalar. Here
the lanes, mostly four, are written down; how many registers they take is LLVM's business. Each lane is
rounded as a single number would be, so a formula gives the same bits in a lane as it does alone; formulas
that use only ``+ - * /`` and `root` take both.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_jitable, register_model

LANES = 4


class Lanes(types.Type):  # type: ignore[misc]  # Numba's classes have no types
    """Numba's type of several numbers of one kind."""

    def __init__(self, element: Any, count: int = LANES) -> None:
        self.element, self.count = element, count
        super().__init__(name=f"Lanes({element} x {count})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]  # Numba's classes have no types
    def __init__(self, manager: Any, lanes: Any) -> None:
        element = manager.lookup(lanes.element).get_value_type()
        super().__init__(manager, lanes, ir.VectorType(element, lanes.count))


def _add_operator(function: Any, instruction: str) -> None:
    @infer_global(function)
    class Template(AbstractTemplate):  # type: ignore[misc]  # Numba's classes have no types
        def generic(self, arguments: Any, keywords: Any) -> Any:
            if len(arguments) == 2 and isinstance(arguments[0], Lanes) and arguments[0] == arguments[1]:
                return signature(arguments[0], *arguments)
            return None

    @lower_builtin(function, Lanes, Lanes)
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*arguments)


for _operator, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _add_operator(_operator, _instruction)


def _lane(number: int) -> ir.Constant:
    return ir.Constant(ir.IntType(32), number)


def _pointer(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


@intrinsic
def load_one(typing_context: Any, address: Any, like: Any) -> Any:
    """The number at an address, of the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = context.get_value_type(like)
        return builder.load(_pointer(builder, arguments[0], element), align=4)

    return like(types.int64, like), generate


@intrinsic
def store_one(typing_context: Any, address: Any, value: Any) -> Any:
    """Write a number to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _pointer(builder, arguments[0], arguments[1].type), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


def _load(count: int) -> Any:
    @intrinsic
    def load(typing_context: Any, address: Any, like: Any) -> Any:
        lanes = Lanes(like, count)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vector = context.get_value_type(lanes)
            return builder.load(_pointer(builder, arguments[0], vector), align=4)

        return lanes(types.int64, like), generate

    return load


# The numbers from an address on, each of the type of ``like``.
load_four, load_sixteen = _load(4), _load(16)


@intrinsic
def store_lanes(typing_context: Any, address: Any, values: Any) -> Any:
    """Write all lanes from an address on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _pointer(builder, arguments[0], arguments[1].type), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, values), generate


def _spread(builder: Any, vector: Any, lane: int, count: int) -> Any:
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), count), [lane] * count)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), everywhere)


def _times(count: int) -> Any:
    @intrinsic
    def times(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vector = ir.VectorType(arguments[0].type, count)
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[0], _lane(0))
            return _spread(builder, one, 0, count)

        return Lanes(value, count)(value), generate

    return times


# A number in all lanes.
four_times, sixteen_times = _times(4), _times(16)


@intrinsic(prefer_literal=True)
def lane_sixteen_times(typing_context: Any, lanes: Any, number: Any) -> Any:
    """One lane of several, by its number, in all of sixteen."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, arguments[0], number.literal_value, 16)

    return Lanes(lanes.element, 16)(lanes, number), generate


@intrinsic
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of all lanes, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        name = f"llvm.fma.v{a.count}f{a.element.bitwidth}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return builder.call(function, arguments)

    return a(a, b, c), generate


@intrinsic
def joined(typing_context: Any, four: Any) -> Any:
    """The sum of the four lanes: ``(a + b) + (c + d)``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, c, d = (builder.extract_element(arguments[0], _lane(lane)) for lane in range(LANES))
        return builder.fadd(builder.fadd(a, b), builder.fadd(c, d))

    return four.element(four), generate


@intrinsic
def joined_each(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """`joined` of each of four, in four lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def lanes(one: Any, other: Any, *numbers: int) -> Any:
            mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(numbers))
            return builder.shuffle_vector(one, other, mask)

        low, other_low = (lanes(*arguments[at : at + 2], 0, 4, 1, 5) for at in (0, 2))
        high, other_high = (lanes(*arguments[at : at + 2], 2, 6, 3, 7) for at in (0, 2))
        zeroth, first = (lanes(low, other_low, at, at + 1, at + 4, at + 5) for at in (0, 2))
        second, third = (lanes(high, other_high, at, at + 1, at + 4, at + 5) for at in (0, 2))
        return builder.fadd(builder.fadd(zeroth, first), builder.fadd(second, third))

    return a(a, b, c, d), generate


@intrinsic
def narrowed(typing_context: Any, four: Any) -> Any:
    """Four numbers of double precision in single precision."""
    narrow = Lanes(types.float32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fptrunc(arguments[0], context.get_value_type(narrow))

    return narrow(four), generate


@intrinsic
def widened(typing_context: Any, four: Any) -> Any:
    """The four numbers in double precision."""
    wide = Lanes(types.float64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if four.element == types.float64:
            return arguments[0]
        return builder.fpext(arguments[0], context.get_value_type(wide))

    return wide(four), generate


@intrinsic
def root(typing_context: Any, value: Any) -> Any:
    """The square root of a number, or of all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        element, lanes = (value.element, f"v{value.count}") if isinstance(value, Lanes) else (value, "")
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(kind, [kind]), f"llvm.sqrt.{lanes}f{element.bitwidth}"
        )
        return builder.call(function, arguments)

    return value(value), generate


@intrinsic
def size_of(typing_context: Any, value: Any) -> Any:
    """Bytes of a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.int64, value.bitwidth // 8)

    return types.int64(value), generate


def _copy(num_bytes: int) -> Any:
    @intrinsic
    def copy(typing_context: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words = ir.VectorType(ir.IntType(32), num_bytes // 4) if num_bytes > 4 else ir.IntType(32)
            moved = builder.load(_pointer(builder, arguments[1], words), align=4)
            builder.store(moved, _pointer(builder, arguments[0], words), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return copy


_copy32, _copy16, _copy4 = _copy(32), _copy(16), _copy(4)


@register_jitable
def copy_row(target: Any, source: Any, num_bytes: Any) -> None:
    """Copy a row of 4-byte words by address: calling ``memcpy`` takes longer than copying a short one."""
    at = 0
    while at + 32 <= num_bytes:
        _copy32(target + at, source + at)
        at += 32
    while at + 16 <= num_bytes:
        _copy16(target + at, source + at)
        at += 16
    while at < num_bytes:
        _copy4(target + at, source + at)
        at += 4


@register_jitable
def clear_row(target: Any, num_values: Any, zero: Any) -> None:
    """Write zeros over a row, by address; ``zero`` is of the row's type."""
    size, zeros = size_of(zero), four_times(zero)
    whole = num_values - num_values % 4
    for k in range(0, whole, 4):
        store_lanes(target + k * size, zeros)
    for k in range(whole, num_values):
        store_one(target + k * size, zero)


@register_jitable
def add_row(target: Any, source: Any, num_values: Any, factor: Any) -> None:
    """Add ``factor`` times a row to another, by address."""
    size, factors = size_of(factor), four_times(factor)
    whole = num_values - num_values % 4
    for k in range(0, whole, 4):
        offset = k * size
        sums = load_four(target + offset, factor) + factors * load_four(source + offset, factor)
        store_lanes(target + offset, sums)
    for k in range(whole, num_values):
        offset = k * size
        store_one(
            target + offset, load_one(target + offset, factor) + factor * load_one(source + offset, factor)
        )
