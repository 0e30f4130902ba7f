"""Four numbers at a time inside a kernel, by address.

Whether LLVM turns a loop over values into vector instructions depends on what it can prove of the memory
behind: of rows that are found by address it proves little, and a step with square roots stays scalar. Here
the four lanes are written down. Each lane is rounded as a single number would be, so a formula gives the same
bits in a lane as it does alone; formulas that use only ``+ - * /`` and `root` take both.
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


class Four(types.Type):  # type: ignore[misc]  # Numba's classes have no types
    """Numba's type of four numbers of one kind."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"Four({element})")


@register_model(Four)
class _FourModel(models.PrimitiveModel):  # type: ignore[misc]  # Numba's classes have no types
    def __init__(self, manager: Any, four: Any) -> None:
        element = manager.lookup(four.element).get_value_type()
        super().__init__(manager, four, ir.VectorType(element, LANES))


def _add_operator(function: Any, instruction: str) -> None:
    @infer_global(function)
    class Template(AbstractTemplate):  # type: ignore[misc]  # Numba's classes have no types
        def generic(self, arguments: Any, keywords: Any) -> Any:
            if len(arguments) == 2 and isinstance(arguments[0], Four) and arguments[0] == arguments[1]:
                return signature(arguments[0], *arguments)
            return None

    @lower_builtin(function, Four, Four)
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


@intrinsic
def load_four(typing_context: Any, address: Any, like: Any) -> Any:
    """The four numbers from an address on, each of the type of ``like``."""
    four = Four(like)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = context.get_value_type(four)
        return builder.load(_pointer(builder, arguments[0], vector), align=4)

    return four(types.int64, like), generate


@intrinsic
def store_four(typing_context: Any, address: Any, values: Any) -> Any:
    """Write four numbers from an address on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _pointer(builder, arguments[0], arguments[1].type), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, values), generate


@intrinsic
def four_times(typing_context: Any, value: Any) -> Any:
    """A number in all lanes."""
    four = Four(value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = context.get_value_type(four)
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[0], _lane(0))
        first_lane = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), first_lane)

    return four(value), generate


@intrinsic
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of four, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        name = f"llvm.fma.v{LANES}f{a.element.bitwidth}"
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
    narrow = Four(types.float32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fptrunc(arguments[0], context.get_value_type(narrow))

    return narrow(four), generate


@intrinsic
def widened(typing_context: Any, four: Any) -> Any:
    """The four numbers in double precision."""
    wide = Four(types.float64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if four.element == types.float64:
            return arguments[0]
        return builder.fpext(arguments[0], context.get_value_type(wide))

    return wide(four), generate


@intrinsic
def root(typing_context: Any, value: Any) -> Any:
    """The square root of a number, or of four."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        element, lanes = (value.element, f"v{LANES}") if isinstance(value, Four) else (value, "")
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
        store_four(target + k * size, zeros)
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
        store_four(target + offset, sums)
    for k in range(whole, num_values):
        offset = k * size
        store_one(
            target + offset, load_one(target + offset, factor) + factor * load_one(source + offset, factor)
        )
