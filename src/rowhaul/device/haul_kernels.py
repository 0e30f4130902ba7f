"""Triton kernels that move records between a card and host memory, which they reach by address.

Records of host memory have their values before their state, in chunks of ``2**HOST_SHIFT`` whose addresses
are in ``host_chunks``. The *home* of a card's record is the number of its row there; or -1 - n: host memory
lacks the row, which was made for batch n; or `FREE`: it holds no row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rowhaul.device.index_kernels import NUM_FREE, NUM_LISTED, NUM_REMOVED, REMOVED
from rowhaul.device.row_kernels import copy_in, copy_out
from rowhaul.device.victim_kernels import is_old_at

FREE = tl.constexpr(-(2**63))
# What is said of records that were to be written back, instead of their numbers.
STAYED, WENT_HOME = tl.constexpr(-1), tl.constexpr(-2)


@triton.jit
def _home_at(host_chunks, home, there, like, HOST_SHIFT: tl.constexpr, RECORD_BYTES: tl.constexpr):
    """Pointers to rows of host memory, of the type of those ``like``."""
    chunk = tl.load(host_chunks + (home >> HOST_SHIFT), mask=there, other=0)
    return (chunk + (home & ((1 << HOST_SHIFT) - 1)) * RECORD_BYTES).to(like.dtype)


@triton.jit(do_not_specialize=["first", "count"])
def evict_listed(
    listed, first, count, latest, places, facts, free, last_used, homes, host_chunks, slots, rows,
    value_chunks, values, state_chunks, states,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr, HOST_SHIFT: tl.constexpr, RECORD_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write rows at listed places back, and take them out of the index, but those used since.

    Their records are free then. Rows that host memory lacks go to ``rows``, and their records to ``slots``.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    is_listed = inside & (first + at < tl.load(facts + NUM_LISTED))
    place = tl.load(listed + first + at, mask=is_listed, other=0)
    word = tl.load(places + 2 * place + 1, mask=is_listed, other=-1)
    is_old, record = is_old_at(word, last_used, is_listed, tl.load(latest))
    home = tl.load(homes + record, mask=is_old, other=-1)
    slot = tl.where(is_old, tl.where(home >= 0, WENT_HOME, record), STAYED)
    tl.store(slots + at, slot, mask=inside)
    old = is_old.to(tl.int64)
    total = tl.sum(old, axis=0)
    if total > 0:
        to = tl.atomic_add(facts + NUM_FREE, total) + tl.cumsum(old, axis=0) - old
        tl.atomic_add(facts + NUM_REMOVED, total)
        tl.store(free + to, record.to(tl.int32), mask=is_old)
        tl.store(places + 2 * place + 1, tl.zeros((BLOCK,), tl.int64) + REMOVED, mask=is_old)
        tl.store(last_used + record, tl.zeros((BLOCK,), tl.int32), mask=is_old)
        tl.store(homes + record, tl.zeros((BLOCK,), tl.int64) + FREE, mask=is_old)
        row = _home_at(host_chunks, home, is_old & (home >= 0), values, HOST_SHIFT, RECORD_BYTES)
        row = tl.where(home >= 0, row, rows + at.to(tl.int64) * (DIM + STATE))
        copy_out(
            record, is_old, row, value_chunks, values, state_chunks, states, DIM, COLUMNS, STATE,
            STATE_COLUMNS, SHIFT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "count", "last_read"])
def write_back(
    first, count, last_read, homes, host_chunks, slots, rows, value_chunks, values, state_chunks, states,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr, HOST_SHIFT: tl.constexpr, RECORD_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for records from ``first`` on, which stay, but rows made for batches after ``last_read``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    record = (first + at).to(tl.int64)
    home = tl.load(homes + record, mask=inside, other=FREE)
    there = (home >= 0) | ((home > FREE) & (-1 - home <= last_read))
    slot = tl.where(there, tl.where(home >= 0, WENT_HOME, record), STAYED)
    tl.store(slots + at, slot, mask=inside)
    record = tl.where(inside, record, 0)
    row = _home_at(host_chunks, home, home >= 0, values, HOST_SHIFT, RECORD_BYTES)
    row = tl.where(home >= 0, row, rows + at.to(tl.int64) * (DIM + STATE))
    copy_out(
        record, there, row, value_chunks, values, state_chunks, states, DIM, COLUMNS, STATE, STATE_COLUMNS,
        SHIFT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["unborn", "count"])
def fetch_rows(
    slots, locations, count, unborn, homes, host_chunks, value_chunks, values, state_chunks, states,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr, HOST_SHIFT: tl.constexpr, RECORD_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows of host memory to records of the card, and note their homes; ``unborn`` if there are none."""
    for block in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = block + tl.arange(0, BLOCK)
        inside = at < count
        record = tl.load(slots + at, mask=inside, other=0)
        home = tl.load(locations + at, mask=inside, other=-1)
        there = home >= 0
        tl.store(homes + record, tl.where(there, home, unborn), mask=inside)
        source = _home_at(host_chunks, home, there, values, HOST_SHIFT, RECORD_BYTES)
        copy_in(
            record, there, source, value_chunks, values, state_chunks, states, DIM, COLUMNS, STATE,
            STATE_COLUMNS, SHIFT,
        )  # fmt: skip
