"""Atomic integers by address, for threads that share memory without a lock, and what they order."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic


def _load(number):
    @intrinsic
    def load(typing_context, address):
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], context.get_value_type(number).as_pointer())
            return builder.load_atomic(pointer, "acquire", number.bitwidth // 8)

        return number(types.int64), generate

    return load


def _compare_exchange(number):
    @intrinsic
    def compare_exchange(typing_context, address, expected, replacement):
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], context.get_value_type(number).as_pointer())
            pair = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst", "monotonic")
            builder.fence("seq_cst")
            return builder.extract_value(pair, 1)

        return types.boolean(types.int64, number, number), generate

    return compare_exchange


# Read an integer of 64 or of 32 bits; nothing later is read before it.
load_acquire, load_acquire32 = _load(types.int64), _load(types.int32)
# Replace an integer if it is the expected one; says whether it was. Orders everything before and after it.
compare_exchange, compare_exchange32 = _compare_exchange(types.int64), _compare_exchange(types.int32)


@intrinsic
def store_release(typing_context, address, value):
    """Write an integer; everything earlier is written before it."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.int64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fetch_add(typing_context, address, number):
    """Add to an integer that several threads count with; returns what it was."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.int64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def order_reads(typing_context):
    """Everything read so far is read before anything that follows."""

    def generate(context, builder, signature, arguments):
        builder.fence("acquire")
        return context.get_dummy_value()

    return types.void(), generate
