"""Kernels that read one field: numbers, integers, hexadecimal ids and hashed strings.

Each takes the addresses of the field's first byte and of the byte behind its last (`rowhaul._memory`) and
returns (error, value), 0 for no error. Addresses are uint64; ``U`` makes constants match.
"""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import load8
from rowhaul.data.keys import xxh64

# What a column is. A PLAIN integer is written in the only way that an int64 is printed; a CHECKED string is
# checked to be UTF-8, which others are known to be. Ids come last, strings at the end.
SKIP, LABEL, NUMBER, COUNT, INTEGER, PLAIN, HEX, STRING, CHECKED = range(9)

# What is wrong with a field or its record.
FIELD_COUNT, UNCLOSED_QUOTE, TEXT_AFTER_QUOTE, LABEL_MISSING, NOT_LABEL = range(1, 6)
NOT_NUMBER, NUMBER_TOO_LARGE, NOT_INTEGER, INTEGER_TOO_LARGE, NOT_HEX, HEX_TOO_LONG = range(6, 12)
NOT_PLAIN, NOT_UTF8 = 12, 13

U = np.uint64

_MINUS, _PLUS, _DOT, _ZERO = 45, 43, 46, 48
_POWERS_OF_TEN = 10.0 ** np.arange(23)  # those a float64 holds exactly
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
# Looked up, since a branch on digit or letter would be mispredicted half of the time.
_HEX_DIGITS = np.full(256, 255, np.uint8)
for _value, _digits in enumerate(zip(b"0123456789abcdef", b"0123456789ABCDEF", strict=True)):
    _HEX_DIGITS[list(_digits)] = _value


@kernel
def parse_key(start, stop, kind, seed):
    """The key of one id: its own value, or the hash of a string."""
    if kind == INTEGER:
        return parse_integer(start, stop)
    if kind == PLAIN:
        return parse_plain(start, stop)
    if kind == HEX:
        return parse_hex(start, stop)
    if kind == CHECKED and not is_utf8(start, stop):
        return NOT_UTF8, 0
    return 0, xxh64(start, stop, seed)


@kernel
def parse_plain(start, stop):
    """An integer without a plus sign, leading zeros or a negative zero: no two texts have the same value."""
    first = start + U(load8(start) == _MINUS)
    if first < stop and (load8(first) == _PLUS or (load8(first) == _ZERO and stop - start > U(1))):
        return NOT_PLAIN, 0
    error, value = parse_integer(start, stop)
    return (NOT_PLAIN, 0) if error != 0 else (0, value)


@kernel
def is_utf8(start, stop):
    """Whether bytes are valid UTF-8: no overlong forms, surrogates or numbers beyond U+10FFFF."""
    at = start
    while at < stop:
        byte = load8(at)
        at += U(1)
        if byte < 0x80:
            continue
        low, high = 0x80, 0xBF  # of the second byte
        if 0xC2 <= byte <= 0xDF:
            more = 1
        elif 0xE0 <= byte <= 0xEF:
            more = 2
            if byte == 0xE0:
                low = 0xA0
            elif byte == 0xED:
                high = 0x9F
        elif 0xF0 <= byte <= 0xF4:
            more = 3
            if byte == 0xF0:
                low = 0x90
            elif byte == 0xF4:
                high = 0x8F
        else:
            return False
        for _ in range(more):
            if at >= stop or load8(at) < low or load8(at) > high:
                return False
            low, high = 0x80, 0xBF
            at += U(1)
    return True


@kernel
def parse_integer(start, stop):
    """An optionally signed decimal integer."""
    negative = load8(start) == _MINUS
    if negative or load8(start) == _PLUS:
        start += U(1)
    if start == stop:
        return NOT_INTEGER, 0
    value = U(0)
    too_large = False
    while start < stop:
        digit = U(load8(start) - 48)
        if digit > U(9):
            return NOT_INTEGER, 0
        if value > U(922337203685477580) or value * U(10) + digit > U(9223372036854775807) + U(negative):
            too_large = True
        value = value * U(10) + digit
        start += U(1)
    if too_large:
        return INTEGER_TOO_LARGE, 0
    return 0, -np.int64(value) if negative else np.int64(value)


@kernel
def parse_hex(start, stop):
    """Up to 16 hexadecimal digits, viewed as int64."""
    value = U(0)
    seen = np.uint8(0)
    for at in range(start, stop):
        digit = _HEX_DIGITS[load8(at)]
        seen |= digit
        value = (value << U(4)) | U(digit)
    if seen > 15:
        return NOT_HEX, 0
    if stop - start > U(16):
        return HEX_TOO_LONG, 0
    return 0, np.int64(value)


@kernel
def parse_number(start, stop, kind):
    """A decimal number, to within one unit in a float64's last place; a COUNT is an integer."""
    if kind == COUNT:
        error, integer = parse_integer(start, stop)
        return error, float(integer)
    negative = load8(start) == _MINUS
    if negative or load8(start) == _PLUS:
        start += U(1)
    mantissa = U(0)
    exponent = 0
    num_digits = 0
    fraction = False
    while start < stop:
        byte = load8(start)
        if byte == _DOT and not fraction:
            fraction = True
        elif 48 <= byte <= 57:
            num_digits += 1
            if mantissa < U(1000000000000000000):
                mantissa = mantissa * U(10) + U(byte - 48)
                exponent -= fraction
            else:
                exponent += not fraction
        else:
            break
        start += U(1)
    if num_digits == 0:
        return NOT_NUMBER, 0.0
    if start < stop:
        if load8(start) != 101 and load8(start) != 69:  # e, E
            return NOT_NUMBER, 0.0
        start += U(1)
        if start == stop:
            return NOT_NUMBER, 0.0
        error, power = parse_integer(start, stop)
        if error != 0:
            return NOT_NUMBER, 0.0
        exponent += min(max(power, -9999), 9999)
    value = float(mantissa)
    if mantissa != U(0):
        if 0 <= exponent <= 22:
            value *= _POWERS_OF_TEN[exponent]
        elif -22 <= exponent < 0:
            value /= _POWERS_OF_TEN[-exponent]
        else:
            value *= 10.0**exponent
    if value > _LARGEST_FLOAT32:
        return NUMBER_TOO_LARGE, 0.0
    return 0, -value if negative else value
