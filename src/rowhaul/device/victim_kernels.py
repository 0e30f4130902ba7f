"""Triton kernels that find the rows of a card's cache used longest ago."""

from __future__ import annotations

import triton
import triton.language as tl

from rowhaul.device.index_kernels import NUM_LISTED, RECORD_BITS

_RECORD_MASK = tl.constexpr((1 << RECORD_BITS.value) - 1)


@triton.jit
def is_old_at(word, last_used, inside, latest):
    """Whether a place holds a row last used by the batch ``latest`` or before; and its record."""
    there = inside & (word >= 0)
    record = tl.where(there, word & _RECORD_MASK, 0)
    use = tl.load(last_used + record, mask=there, other=0)
    return there & (use > 0) & (use <= latest), record


@triton.jit(do_not_specialize=["capacity", "stride", "most"])
def list_old(places, capacity, stride, last_used, latest, listed, facts, most, BLOCK: tl.constexpr):
    """List the places of rows last used by the batch ``latest`` or before, ``most`` of them.

    Neighbours are ``stride`` places apart: were a stretch of the index emptied while others fill up, searches
    there would get long.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < capacity
    at = at * stride % capacity
    word = tl.load(places + 2 * at + 1, mask=inside, other=-1)
    is_old, _ = is_old_at(word, last_used, inside, tl.load(latest))
    old = is_old.to(tl.int64)
    total = tl.sum(old, axis=0)
    if total > 0:
        to = tl.atomic_add(facts + NUM_LISTED, total) + tl.cumsum(old, axis=0) - old
        tl.store(listed + to, at, mask=is_old & (to < most))
