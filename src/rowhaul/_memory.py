"""Reading memory by address inside a kernel.

Records live in chunks that are allocated one by one, so a kernel gets an array of chunk addresses
instead of one big array: growing then never copies, and a record is one shift and one mask away.
Arrays made here own nothing; take no slices of them in a hot loop, which costs more than the work.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@register_jitable
def memory_at(address: int, length: int, dtype: Any) -> Any:
    """The ``length`` elements of ``dtype`` that start at ``address``, as an array without a copy."""
    return carray(_pointer(address), (length,), dtype)


@register_jitable
def record_address(addresses: Any, shift: int, record_bytes: int, record: int) -> Any:
    """Address of a record in chunks of ``2**shift`` records each."""
    return addresses[record >> shift] + (record & ((1 << shift) - 1)) * record_bytes


@intrinsic
def data_address(typing_context: Any, array: Any) -> Any:
    """Where an array's first element is: loops that follow addresses carry integers instead of arrays.

    Numba frees an array after its last use, and does not know that the address is one: a kernel that made the
    array itself needs `keep_alive` after the last use of the address.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), generate


@intrinsic
def keep_alive(typing_context: Any, array: Any) -> Any:
    """Do nothing; until here, an array that the kernel made is not freed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), generate


@intrinsic
def _load_address(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=8)

    return types.int64(types.int64), generate


@register_jitable
def record_at(chunks: int, shift: int, record_bytes: int, record: int) -> Any:
    """`record_address` where ``chunks`` is the address of the array of chunk addresses."""
    return _load_address(chunks + 8 * (record >> shift)) + (record & ((1 << shift) - 1)) * record_bytes


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """``memcpy`` by address: for a row of a few dozen bytes, much faster than a loop over its values."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [builder.inttoptr(address, cgutils.voidptr_t) for address in arguments[:2]]
        cgutils.raw_memcpy(builder, *pointers, arguments[2], itemsize=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _prefetch(for_writing: bool) -> Any:
    @intrinsic
    def prefetch(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            flag = ir.IntType(32)
            function = builder.module.declare_intrinsic(
                "llvm.prefetch",
                [cgutils.voidptr_t],
                ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag]),
            )
            pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
            nearest_cache, data = flag(3), flag(1)
            builder.call(function, [pointer, flag(int(for_writing)), nearest_cache, data])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return prefetch


# Ask for the cache line at an address that is read or written soon; any address is allowed. Rows
# of a large table are scattered, and without this a loop waits for each of them.
prefetch_to_read = _prefetch(for_writing=False)
prefetch_to_write = _prefetch(for_writing=True)


# Bytes of text. Numba counts references to an array at every call it is passed to, which costs more than
# reading a field does, so text kernels pass plain addresses (uint64) to each other.


def _load(result: Any) -> Any:
    def load(typing_context, address):
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], context.get_value_type(result).as_pointer())
            return builder.load(pointer, align=1)

        return result(types.uint64), generate

    return intrinsic(load)


load8 = _load(types.uint8)  # one byte
load32 = _load(types.uint32)  # four bytes, the first the lowest
load64 = _load(types.uint64)  # eight bytes, the first the lowest


@intrinsic
def store8(typing_context, address, byte):
    """Write one byte."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.uint8).as_pointer())
        builder.store(arguments[1], pointer)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint8), generate


# Aligned 64-bit words, by addresses as plain integers; `rowhaul._atomic` has those that threads share.

_WORD = ir.IntType(64)


@intrinsic
def read_word(typing_context, address):
    """The word at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], _WORD.as_pointer()), align=8)

    return types.uint64(types.int64), generate


@intrinsic
def write_word(typing_context, address, word):
    """Replace the word at an address."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@intrinsic
def pairs_below(typing_context, line, word):
    """How many of the four pairs of words of a cache line have a first word below the given one."""

    def generate(context, builder, signature, arguments):
        vector = ir.VectorType(_WORD, 8)
        undefined = ir.Constant(vector, ir.Undefined)
        words = builder.load(builder.inttoptr(arguments[0], vector.as_pointer()), align=64)
        once = builder.insert_element(undefined, arguments[1], ir.IntType(32)(0))
        eight_times = builder.shuffle_vector(
            once, undefined, ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
        )
        below = builder.bitcast(builder.icmp_unsigned("<", words, eight_times), ir.IntType(8))
        first_words = builder.and_(below, ir.IntType(8)(0b01010101))
        return builder.zext(builder.ctpop(first_words), _WORD)

    return types.int64(types.int64, types.uint64), generate


@intrinsic
def leading_zeros(typing_context, word):
    """How many bits of a word are zero before the first that is not."""

    def generate(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.uint64), generate
