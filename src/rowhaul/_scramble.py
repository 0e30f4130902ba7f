"""Where an entry goes in a hash table in memory: a secret of this process decides.

Ids come from logs, and logs from strangers. With a fixed hash anyone can compute ids that all want one place:
an insert then moves thousands of entries, and finding the distinct ids of a batch takes time that grows with
the square of its size. So positions in memory depend on numbers drawn from the operating system when the
process begins. They are never written, printed or sent, and no other process needs them: what ranks exchange,
agree on and save names rows by table and key, or by numbers handed out in the order of a batch. Each process
draws its own.

This is for positions in memory only. What is learned or written (homes, filters, samples, initial values, the
order of rows in files) depends on the configured seed, the table and the key; those hashes stay as they are.

* `scrambled` is a bijection, for tables that keep the scrambled word instead of the key: a Feistel network of
  three rounds, each a secret product of 32 by 32 bits, folded. In vector registers, several at once.
* `placed` is not, and quicker for one word at a time: a product of 64 by 64 bits, folded, times another.

Both scatter sequences, multiples of powers of two, grids and whatever collided under the fixed hashes like
random keys (`tests/test_scramble.py`). They are no ciphers: they withstand who prepares data, not who can
time single operations of this process. Take positions from the highest bits.

Kernels find the numbers under a symbol that is bound when machine code is loaded: kernels cached on disk hold
no secret and serve every process.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types, uint64
from numba.extending import intrinsic, register_jitable

SECRET_BYTES = 48
_SYMBOL = "rowhaul_secret_of_positions"
_secret: npt.NDArray[np.uint8] = np.zeros(SECRET_BYTES, np.uint8)


def draw_secret(given: bytes | None = None) -> bytes:
    """Draw the secret anew, or take the one given; returns the one before.

    Tables made under another secret do not find what they hold.
    """
    before = _secret.tobytes()
    _secret[:] = np.frombuffer(given or os.urandom(SECRET_BYTES), np.uint8)
    return before


draw_secret()
binding.add_symbol(_SYMBOL, _secret.ctypes.data)


def _number(bits: int, which: int) -> Any:
    """A function for kernels: number ``which`` of ``bits`` bits of the secret."""

    @intrinsic
    def number(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            secret = builder.module.globals.get(_SYMBOL)
            if secret is None:
                secret = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), SECRET_BYTES), _SYMBOL)
                secret.linkage = "external"
            pointer = builder.bitcast(secret, ir.IntType(bits).as_pointer())
            word = builder.load(builder.gep(pointer, [ir.IntType(32)(which)]), align=bits // 8)
            word.set_metadata("invariant.load", builder.module.add_metadata([]))  # once for a whole loop
            return word if bits == 64 else builder.zext(word, ir.IntType(64))

        return types.uint64(), generate

    return number


_offset, _factor1, _factor2, _factor3 = (_number(32, which) for which in range(4))
_word_offset, _word_factor, _last_factor, _table_factor = (_number(64, which) for which in range(2, 6))

_LOW = 0xFFFFFFFF


@register_jitable
def _folded(half: Any, factor: Any) -> Any:
    """Hash 32 bits to 32; higher bits are ignored, and whatever comes out above is to be."""
    product = (half & uint64(_LOW)) * (factor | uint64(1))
    return product ^ (product >> uint64(32))


@register_jitable
def scrambled(word: Any) -> Any:
    """Another word for each word, scattered over all."""
    low = uint64(word)
    high = (low >> uint64(32)) ^ _folded(low, _factor1())
    low ^= _folded(high ^ _offset(), _factor2())
    high ^= _folded(low, _factor3())
    return (high << uint64(32)) | (low & uint64(_LOW))


@register_jitable
def unscrambled(word: Any) -> Any:
    """The word that was scrambled."""
    low = uint64(word)
    high = (low >> uint64(32)) ^ _folded(low, _factor3())
    low ^= _folded(high ^ _offset(), _factor2())
    high ^= _folded(low, _factor1())
    return (high << uint64(32)) | (low & uint64(_LOW))


@intrinsic
def _product_folded(typing_context: Any, one: Any, other: Any) -> Any:
    """The two halves of a product of 128 bits, one on the other."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        high = builder.trunc(builder.lshr(product, wide(64)), word)
        return builder.xor(builder.trunc(product, word), high)

    return types.uint64(types.uint64, types.uint64), generate


@register_jitable
def placed(word: Any) -> Any:
    """A hash by whose highest bits a word gets its place."""
    return _product_folded(uint64(word) ^ _word_offset(), _word_factor()) * (_last_factor() | uint64(1))


@register_jitable
def placed_row(table: Any, key: Any) -> Any:
    """The same for a row of one of several tables: which rows of two of them meet is secret as well."""
    return placed(uint64(key) + uint64(table) * _table_factor())
