"""Triton kernels that plan a batch of a card's cache: which rows it uses, and which of them are missing."""

from __future__ import annotations

import triton
import triton.language as tl

from rowhaul.device.index_kernels import NUM_NEW, append_missing, write_found

HEADER = tl.constexpr(2)  # words before a list of rows, of which the first counts them


@triton.jit(do_not_specialize=["number"])
def look_up(
    keys, tables, places, held_keys, held_tables, facts, records, missing, last_used, number, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the record of each (table, key), and note that batch ``number`` uses it; list ids without one."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    record = write_found(keys, tables, places, held_keys, held_tables, facts, records, at, inside, BLOCK)
    tl.store(last_used + record, tl.zeros((BLOCK,), tl.int32) + number, mask=inside & (record >= 0))
    append_missing(inside & (record < 0), at, missing, facts)


@triton.jit(do_not_specialize=["most", "number"])
def list_rows(ids, facts, records, keys, tables, last_used, number, out, most, BLOCK: tl.constexpr):
    """List the rows of ids that are new in the index, and note that batch ``number`` uses them.

    Writes how many there are, then their records, keys and tables in three rows of ``most``.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(facts + NUM_NEW)
    inside = at < count
    which = tl.load(ids + at, mask=inside, other=0)
    record = tl.load(records + which, mask=inside, other=0)
    tl.store(out + at, tl.zeros((BLOCK,), tl.int64) + count, mask=at == 0)
    rows = out + HEADER + at
    tl.store(rows, record.to(tl.int64), mask=inside)
    tl.store(rows + most, tl.load(keys + which, mask=inside, other=0), mask=inside)
    tl.store(rows + 2 * most, tl.load(tables + which, mask=inside, other=0).to(tl.int64), mask=inside)
    tl.store(last_used + record, tl.zeros((BLOCK,), tl.int32) + number, mask=inside)
