"""Numbers as people write and read them: ``5gbit``, ``50us``, ``2GiB``, per worker ``5gbit*4,0.5gbit*4``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from rowhaul.errors import ConfigError

Value = TypeVar("Value")

_NUMBER = re.compile(
    r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?(?:nan|inf))\s*([a-z/]*)\s*", re.I
)

_UNCLEAR_SPEED = re.compile(r".*[kKmMgGtT]b(/s)?")  # networks are sold in Gb, which are bits

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY_PREFIXES = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
BYTE_UNITS = {f"{prefix}b": scale for prefix, scale in (_PREFIXES | _BINARY_PREFIXES).items()}
SPEED_UNITS = {f"{prefix}bit": scale / 8 for prefix, scale in _PREFIXES.items()} | BYTE_UNITS
PERIOD_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

LEAST_SPEED, MOST_SPEED = 1e3 / 8, 1e15 / 8  # bytes a second: beyond these sums of times lose their meaning
MOST_SECONDS = 1e6
MOST_BYTES = 1e15
_MOST_DIGITS = 18  # of a number of nodes
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float) -> str:
    """Format bytes in the largest unit that leaves a number of at least one."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.0f} B" if unit == 0 else f"{count:,.1f} {_UNITS[unit]}"


def seconds_text(seconds: float) -> str:
    """Format a short time: ``0.25 ms``, ``12 ms``, ``1.4 s``."""
    if seconds >= 1:
        return f"{seconds:,.1f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.{2 if milliseconds < 1 else 1 if milliseconds < 10 else 0}f} ms"


def parse_speed(text: str, option: str) -> float:
    """Bytes a second, from bits (``5gbit``) or bytes (``600MB``)."""
    speed = _parse(text, option, SPEED_UNITS, "a speed such as 5gbit (bits) or 600MB (bytes) a second")
    if _UNCLEAR_SPEED.fullmatch(text.strip()):
        number = re.sub("(?i)b(/s)?$", "", text.strip())
        raise ConfigError(f"{option}: {text!r} may mean bits or bytes; write {number}bit or {number}B")
    if speed <= 0:
        raise ConfigError(f"{option}: {text!r} is no speed; it must be above 0")
    if not LEAST_SPEED <= speed <= MOST_SPEED:
        raise ConfigError(f"{option}: {text!r} is out of range; a link has 1kbit to 1000tbit a second")
    return speed


def parse_seconds(text: str, option: str) -> float:
    """Seconds, from ``50us``, ``0.2ms``, ``1s`` or a plain 0."""
    if text.strip() == "0":
        return 0.0
    seconds = _parse(text, option, TIME_UNITS, "a time such as 50us, 0.2ms or 1s")
    if seconds > MOST_SECONDS:
        raise ConfigError(f"{option}: {text!r} is too long; it must be at most {MOST_SECONDS:,.0f}s")
    return seconds


def parse_period(text: str, option: str) -> float:
    """Seconds, from ``90s``, ``15min``, ``2h`` or ``1d``."""
    return _parse(text, option, PERIOD_UNITS, "a time such as 90s, 15min or 2h")


def parse_bytes(text: str, option: str) -> int:
    """Bytes, from ``2GiB``, ``500mb``, ``100b`` or a plain 0."""
    if text.strip() == "0":
        return 0
    size = _parse(text, option, BYTE_UNITS, "a size such as 2GiB, 500mb or 100b")
    if size > MOST_BYTES:
        raise ConfigError(f"{option}: {text!r} is too large; it must be at most {MOST_BYTES / 1e12:,.0f}tb")
    return round(size)


def parse_number(text: str, option: str) -> float:
    """A number of at least 0."""
    return _parse(text, option, {"": 1.0}, "a number such as 200 or 0.5")


def parse_for_each(
    text: str, count: int, option: str, parse: Callable[[str, str], Value], nodes: str = "workers"
) -> tuple[Value, ...]:
    """One value per node: ``x*4,y*4`` is four times x, then four times y; a lone ``x`` is for all."""
    items = [item.strip() for item in text.split(",")]
    if len(items) == 1 and "*" not in text:
        return (parse(items[0], option),) * count
    named: list[tuple[str, int]] = []  # values, and how many nodes each is for
    for item in items:
        value, star, times = item.partition("*")
        times = times.strip() if star else "1"
        if not times.isdecimal():
            raise ConfigError(f"{option}: {item!r} should end in how many {nodes} it is for, e.g. {value}*4")
        if len(times) > _MOST_DIGITS:
            raise ConfigError(f"{option}: {item!r} is for too many {nodes}; there are {count}")
        named.append((value, int(times)))
    total = sum(times for _, times in named)
    if total != count:
        raise ConfigError(
            f"{option} {text} names {total} {nodes}, but there are {count}; give one value for all, "
            "or one for each (x*4,y*4 is four times x, then four times y)"
        )
    return tuple(parsed for value, times in named for parsed in (parse(value, option),) * times)


def _parse(text: str, option: str, units: Mapping[str, float], example: str) -> float:
    match = _NUMBER.fullmatch(text.replace("µ", "u"))
    if not match:
        raise ConfigError(f"{option}: {text!r} is not understood; write {example}")
    unit = match[2].lower().removesuffix("/s") if units is SPEED_UNITS else match[2].lower()
    if unit not in units:
        known = ", ".join(name for name in units if name != "µs") or "none"
        problem = f"has the unknown unit {match[2]!r}" if unit else "has no unit"
        if units == {"": 1.0}:
            problem, known = f"has a unit, {match[2]!r}", "none"
        raise ConfigError(f"{option}: {text!r} {problem}; write {example} (units: {known})")
    value = float(match[1].replace("_", "")) * units[unit]
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{option}: {text!r} must be a finite number, not negative; write {example}")
    return value
