"""Triton kernels that move records between a card and host memory, which they reach by address.

Records of host memory have their values before their state, in chunks of ``2**HOST_SHIFT`` whose addresses
are in ``host_chunks``. The *home* of a card's record is the number of its row there; or -1 - n: host memory
lacks the row, which was made for batch n; or `FREE`: it holds no row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rowhaul.device.index_kernels import NUM_FREE, NUM_LISTED, NUM_REMOVED, search, take_out
from rowhaul.device.row_kernels import copy_in, copy_out
from rowhaul.device.victim_kernels import is_old

FREE = tl.constexpr(-(2**31))
# What is said of records that were to be written back, instead of their numbers.
STAYED, WENT_HOME = tl.constexpr(-1), tl.constexpr(-2)


@triton.jit
def _home_at(host_chunks, home, there, like, HOST_SHIFT: tl.constexpr, RECORD_BYTES: tl.constexpr):
    """Pointers to rows of host memory, of the type of those ``like``."""
    chunk = tl.load(host_chunks + (home >> HOST_SHIFT), mask=there, other=0)
    return (chunk + (home & ((1 << HOST_SHIFT) - 1)) * RECORD_BYTES).to(like.dtype)


@triton.jit(do_not_specialize=["first", "count"])
def evict_listed(
    listed, first, count, latest, places, held_keys, held_tables, facts, last_used, homes, host_chunks,
    slots, rows,
    value_chunks, values, state_chunks, states,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STATE: tl.constexpr, STATE_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr, HOST_SHIFT: tl.constexpr, RECORD_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write rows of listed records back, and take them out of the index, but those used since.

    Their records are free then. Rows that host memory lacks go to ``rows``, and their records to ``slots``.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    is_listed = inside & (first + at < tl.load(facts + NUM_LISTED))
    record = tl.load(listed + first + at, mask=is_listed, other=0).to(tl.int64)
    goes = is_old(record, last_used, is_listed, tl.load(latest))
    home = tl.load(homes + record, mask=goes, other=-1).to(tl.int64)
    slot = tl.where(goes, tl.where(home >= 0, WENT_HOME, record), STAYED)
    tl.store(slots + at, slot, mask=inside)
    total = tl.sum(goes.to(tl.int64), axis=0)
    if total > 0:
        tl.atomic_add(facts + NUM_FREE, total)
        tl.atomic_add(facts + NUM_REMOVED, total)
        key = tl.load(held_keys + record, mask=goes, other=0)
        table = tl.load(held_tables + record, mask=goes, other=0).to(tl.int64)
        place, _ = search(key, table, goes, places, held_keys, held_tables, facts, BLOCK)
        take_out(place, record, goes, places, held_tables, BLOCK)
        tl.store(last_used + record, tl.zeros((BLOCK,), tl.int32), mask=goes)
        tl.store(homes + record, tl.zeros((BLOCK,), tl.int32) + FREE, mask=goes)
        row = _home_at(host_chunks, home, goes & (home >= 0), values, HOST_SHIFT, RECORD_BYTES)
        row = tl.where(home >= 0, row, rows + at.to(tl.int64) * (DIM + STATE))
        copy_out(
            record, goes, row, value_chunks, values, state_chunks, states, DIM, COLUMNS, STATE,
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
    home = tl.load(homes + record, mask=inside, other=FREE).to(tl.int64)
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
        tl.store(homes + record, tl.where(there, home, unborn).to(tl.int32), mask=inside)
        source = _home_at(host_chunks, home, there, values, HOST_SHIFT, RECORD_BYTES)
        copy_in(
            record, there, source, value_chunks, values, state_chunks, states, DIM, COLUMNS, STATE,
            STATE_COLUMNS, SHIFT,
        )  # fmt: skip
