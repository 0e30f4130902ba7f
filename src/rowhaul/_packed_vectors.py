"""Numbers of few bits inside a kernel, several at a time, by address: float32 here, packed there.

A number ``like`` selects the packed type by its own: uint16 stands for bfloat16, int16 for float16, int8 for
int8. An int8 is a share of its row's scale, from -127 to 127.

Packing rounds up or down at random such that the mean is right, by sixteen bits for each number. These are a
function of the row's seed and the column (`_Lanes.draws`). Everything is spelled out in integers and
correctly rounded operations: the same bits on every processor, in a vector and alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rowhaul._vectors import LANES as FOUR
from rowhaul._vectors import Lanes

BFLOAT16, FLOAT16, INT8 = types.uint16, types.int16, types.int8
# A little below 127: what is largest in its row never rounds to 128.
MOST_INT8 = 126.9999

_EIGHT = 8

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()


def _many(element: Any, lanes: int) -> Any:
    return element if lanes == 1 else ir.VectorType(element, lanes)


class _Lanes:
    """A builder for operations on so many lanes."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.b, self.lanes = builder, lanes
        self.ints, self.floats = _many(_I32, lanes), _many(_FLOAT, lanes)

    def constant(self, kind: Any, value: Any) -> Any:
        return ir.Constant(kind, value if self.lanes == 1 else [value] * self.lanes)

    def int32(self, value: int) -> Any:
        return self.constant(self.ints, value)

    def float32(self, value: float) -> Any:
        return self.constant(self.floats, value)

    def all_of(self, value: Any) -> Any:
        """A value in all lanes."""
        if self.lanes == 1:
            return value
        undefined = ir.Constant(_many(value.type, self.lanes), ir.Undefined)
        one = self.b.insert_element(undefined, value, _I32(0))
        return self.b.shuffle_vector(one, undefined, ir.Constant(self.ints, [0] * self.lanes))

    def as_float(self, bits: Any) -> Any:
        return self.b.bitcast(bits, self.floats)

    def as_bits(self, numbers: Any) -> Any:
        return self.b.bitcast(numbers, self.ints)

    def pointer(self, address: Any, element: Any) -> Any:
        return self.b.inttoptr(address, _many(element, self.lanes).as_pointer())

    def load(self, address: Any, element: Any = _FLOAT) -> Any:
        return self.b.load(self.pointer(address, element), align=_align(element))

    def store(self, address: Any, numbers: Any, element: Any = _FLOAT) -> None:
        self.b.store(numbers, self.pointer(address, element), align=_align(element))

    def store_low(self, address: Any, bits: Any, element: Any) -> None:
        self.store(address, self.b.trunc(bits, _many(element, self.lanes)), element)

    def draws(self, seed: Any, column: Any) -> Any:
        """Sixteen bits for each lane, from a column on.

        The upper halves of 32-bit numbers ``first + column * step``, of which the seed gives both: each is
        uniform and any two columns are independent, as far as those are random, which is what the sum of
        rounding errors depends on.
        """
        b = self.b
        first, step = b.trunc(seed, _I32), b.or_(b.trunc(b.lshr(seed, _I64(32)), _I32), _I32(1))
        word = self.all_of(b.add(first, b.mul(b.trunc(column, _I32), step)))
        if self.lanes > 1:
            word = b.add(word, b.mul(self.all_of(step), ir.Constant(self.ints, list(range(self.lanes)))))
        return b.lshr(word, self.int32(16))

    # Reading.

    def read_bfloat16(self, address: Any) -> Any:
        bits = self.b.zext(self.load(address, _I16), self.ints)
        return self.as_float(self.b.shl(bits, self.int32(16)))

    def read_float16(self, address: Any) -> Any:
        b = self.b
        bits = b.sext(self.load(address, _I16), self.ints)
        size = b.and_(b.shl(bits, self.int32(13)), self.int32(0x0FFFE000))
        # With the exponent of float16, which is 112 below; of small numbers, whose exponent is 0, as well.
        number = b.fmul(self.as_float(size), self.float32(2.0**112))
        endless = self.as_float(b.or_(size, self.int32(255 << 23)))  # infinity, or no number
        number = b.select(b.icmp_signed(">=", size, self.int32(31 << 23)), endless, number)
        sign = b.and_(bits, self.int32(-(1 << 31)))
        return self.as_float(b.or_(self.as_bits(number), sign))

    def read_int8(self, address: Any) -> Any:
        return self.b.sitofp(self.load(address, _I8), self.floats)

    # Writing, by sixteen random bits.

    def write_bfloat16(self, address: Any, numbers: Any, draw: Any) -> None:
        b, bits = self.b, self.as_bits(numbers)
        size = b.and_(bits, self.int32(0x7FFFFFFF))
        # What is no number stays none: cards write it in ones, which the draw would carry over to zero.
        is_none = b.icmp_signed(">", size, self.int32(255 << 23))
        bits = b.select(is_none, b.or_(bits, self.int32(1 << 22)), b.add(bits, draw))
        self.store_low(address, b.lshr(bits, self.int32(16)), _I16)

    def write_float16(self, address: Any, numbers: Any, draw: Any) -> None:
        b = self.b
        bits, some = self.as_bits(numbers), b.lshr(draw, self.int32(3))  # 13 bits are cut off
        size = b.and_(bits, self.int32(0x7FFFFFFF))
        normal = b.sub(b.lshr(b.add(size, some), self.int32(13)), self.int32(112 << 10))
        # What is too large, or no number, becomes infinite.
        is_large = b.icmp_signed(">=", size, self.int32(143 << 23))
        normal = b.select(is_large, self.int32(0x7C00), normal)
        # Below the smallest normal number all steps are of one size, 2**-24.
        is_small = b.icmp_signed("<", size, self.int32(113 << 23))
        small = b.select(is_small, self.as_float(size), self.float32(0.0))
        part = b.fmul(b.sitofp(some, self.floats), self.float32(2.0**-13))
        steps = b.fptosi(b.fadd(b.fmul(small, self.float32(2.0**24)), part), self.ints)
        found = b.select(is_small, steps, normal)
        sign = b.and_(b.lshr(bits, self.int32(16)), self.int32(0x8000))
        self.store_low(address, b.or_(found, sign), _I16)

    def write_int8(self, address: Any, shares: Any, draw: Any) -> None:
        # From 128 to 256 the last bit of a float is 2**-16: the draw is the fraction of 128 and something.
        above = self.b.fadd(shares, self.as_float(self.b.or_(draw, self.int32(0x43000000))))
        steps = self.b.fptosi(above, self.ints)  # all above 0, where cutting off rounds down
        self.store_low(address, self.b.sub(steps, self.int32(128)), _I8)


_READ = {BFLOAT16: _Lanes.read_bfloat16, FLOAT16: _Lanes.read_float16, INT8: _Lanes.read_int8}
_WRITE = {BFLOAT16: _Lanes.write_bfloat16, FLOAT16: _Lanes.write_float16, INT8: _Lanes.write_int8}


def _align(element: Any) -> int:
    return 4 if element is _FLOAT else int(element.width) // 8


def _unpacking(lanes: int, adds: bool) -> Any:
    @intrinsic
    def unpack(typing_context: Any, target: Any, source: Any, scale: Any, like: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            of = _Lanes(builder, lanes)
            numbers = _READ[like](of, arguments[1])
            if like == INT8:
                numbers = builder.fmul(numbers, of.all_of(arguments[2]))
            of.store(arguments[0], numbers)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32, like), generate

    @intrinsic
    def add(typing_context: Any, target: Any, source: Any, scale: Any, factor: Any, like: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            of = _Lanes(builder, lanes)
            numbers = _READ[like](of, arguments[1])
            if like == INT8:
                numbers = builder.fmul(numbers, of.all_of(arguments[2]))
            numbers = builder.fmul(of.all_of(arguments[3]), numbers)
            of.store(arguments[0], builder.fadd(of.load(arguments[0]), numbers))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.float32, types.float32, like), generate

    return add if adds else unpack


# Write numbers, times their scale, to an address; or add them, times a factor, to the numbers there.
unpack_eight, unpack_one = _unpacking(_EIGHT, False), _unpacking(1, False)
add_eight, add_one = _unpacking(_EIGHT, True), _unpacking(1, True)


def _packing(lanes: int) -> Any:
    @intrinsic
    def pack(
        typing_context: Any, target: Any, source: Any, share: Any, seed: Any, column: Any, like: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            of = _Lanes(builder, lanes)
            target, source, share, seed, column, _ = arguments
            numbers = of.load(source)
            if like == INT8:
                numbers = builder.fmul(numbers, of.all_of(share))
            _WRITE[like](of, target, numbers, of.draws(seed, column))
            return context.get_dummy_value()

        given = types.int64, types.int64, types.float32, types.uint64, types.int64
        return types.void(*given, like), generate

    return pack


# Round numbers, times their share of a scale, to an address; ``column`` is the first one's.
pack_eight, pack_one = _packing(_EIGHT), _packing(1)


@intrinsic
def packed_size(typing_context: Any, like: Any) -> Any:
    """Bytes of a packed number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.int64, like.bitwidth // 8)

    return types.int64(like), generate


@intrinsic
def has_scale(typing_context: Any, like: Any) -> Any:
    """Whether packed numbers are shares of a scale."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.boolean, like == INT8)

    return types.boolean(like), generate


def _larger(lanes: int) -> Any:
    kind = types.float32 if lanes == 1 else Lanes(types.float32)

    @intrinsic
    def larger(typing_context: Any, most: Any, numbers: Any) -> Any:
        """The larger of sizes and of numbers without their signs; what is no number is larger than all."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            of = _Lanes(builder, lanes)
            before = of.as_bits(arguments[0])
            size = builder.and_(of.as_bits(arguments[1]), of.int32(0x7FFFFFFF))
            return of.as_float(builder.select(builder.icmp_signed(">", size, before), size, before))

        return kind(kind, kind), generate

    return larger


larger_one, larger_four = _larger(1), _larger(FOUR)


@intrinsic
def largest_lane(typing_context: Any, sizes: Any) -> Any:
    """The largest of four sizes, as `larger_four` has them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        of = _Lanes(builder, FOUR)
        bits = of.as_bits(arguments[0])
        for order in ([2, 3, 0, 1], [1, 0, 3, 2]):
            other = builder.shuffle_vector(bits, bits, ir.Constant(of.ints, order))
            bits = builder.select(builder.icmp_signed(">", other, bits), other, bits)
        return builder.extract_element(of.as_float(bits), _I32(0))

    return types.float32(sizes), generate
