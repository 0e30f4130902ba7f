"""Triton kernels that find the rows of a card's cache used longest ago."""

from __future__ import annotations

import triton
import triton.language as tl

from rowhaul.device.index_kernels import NUM_LISTED


@triton.jit
def is_old(record, last_used, inside, latest):
    """Whether records hold rows last used by the batch ``latest`` or before."""
    use = tl.load(last_used + record, mask=inside, other=0)
    return (use > 0) & (use <= latest)


@triton.jit(do_not_specialize=["count", "most"])
def list_old(last_used, count, latest, listed, facts, most, BLOCK: tl.constexpr):
    """List the records whose rows were last used by the batch ``latest`` or before, ``most`` of them."""
    record = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    old = is_old(record, last_used, record < count, tl.load(latest))
    one = old.to(tl.int64)
    total = tl.sum(one, axis=0)
    if total > 0:
        to = tl.atomic_add(facts + NUM_LISTED, total) + tl.cumsum(one, axis=0) - one
        tl.store(listed + to, record.to(tl.int32), mask=old & (to < most))
