"""Compiled loops of `SlotMap`: who has a slot, who is read how often, who is to get one.

An id is a hash of 64 bits of its table's seed and its key. It may have a slot in two buckets of 8 places;
there a print of 16 bits of the hash and its table tell it from others (one of some 4,000 ids without a slot
finds that of another, and shares its row). All numbers are integers, and none depends on the order of rows in
a batch.
"""

from __future__ import annotations

from numba import int64, uint8, uint16, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import data_address, prefetch_to_read, prefetch_to_write
from rowhaul.store.records import mix

BUCKET = 8
_AHEAD = 16  # rows whose buckets are asked for before they are searched
_SECOND = uint64(0x9E3779B97F4A7C15)
_MOST_SLOT, _MOST_CELL = 65535, 255
# Of an id without a slot, while a batch is counted: which it is, its cells, what they held, its bucket.
OTHERS = 6
_ID, _TABLE, _CELL, _OTHER_CELL, _BEFORE, _PLACE = range(OTHERS)


@register_jitable
def _place(hashed, num_buckets):
    """Return an id's first bucket and its print, which is never 0: that of an empty place."""
    bucket = int64(((hashed >> uint64(32)) * uint64(num_buckets)) >> uint64(32))
    mark = uint16(hashed & uint64(0xFFFF))
    return bucket, uint16(1) if mark == 0 else mark


@register_jitable
def _second(hashed, num_buckets):
    other = mix(hashed ^ _SECOND) >> uint64(32)
    return int64((other * uint64(num_buckets)) >> uint64(32))


@register_jitable
def _cells(hashed, width):
    """Return an id's cell in each of the two rows of the sketch."""
    one = mix(hashed + _SECOND)
    first = int64(((one >> uint64(32)) * uint64(width)) >> uint64(32))
    second = int64(((one & uint64(0xFFFFFFFF)) * uint64(width)) >> uint64(32))
    return first, second


@register_jitable
def _found_in(bucket, mark, table, marks, owners):
    """Return an id's slot in a bucket; -1: it is not there."""
    first = bucket * BUCKET
    found = int64(-1)
    for place in range(BUCKET):
        if marks[first + place] == mark and owners[first + place] == table:
            found = first + place
    return found


@register_jitable
def _shared_row(bits, size, mask):
    """Return one of ``size`` shared rows; ``mask`` + 1 is the least power of two that is not below ``size``.

    As in linear hashing: when there is one more, ids move to it from one other, and no more move.
    """
    row = bits & mask
    return int64(row if row < size else bits & (mask >> uint64(1)))


@kernel
def find_rows(keys, starts, seeds, marks, owners, sizes, masks, hashed, rows):
    """Find the rows of keys, given table by table: a slot, or ``-1 - j`` for shared row ``j`` of a table."""
    num_buckets = len(marks) // BUCKET
    marks_at, owners_at = data_address(marks), data_address(owners)
    for table in range(len(starts) - 1):
        seed, size, mask = seeds[table], uint64(sizes[table]), masks[table]
        for i in range(starts[table], starts[table + 1]):
            hashed[i] = mix(uint64(keys[i]) ^ seed)
        for i in range(starts[table], starts[table + 1]):
            ahead = i + _AHEAD
            if ahead < starts[table + 1]:
                bucket, _ = _place(hashed[ahead], num_buckets)
                prefetch_to_read(marks_at + bucket * BUCKET * 2)
                prefetch_to_read(owners_at + bucket * BUCKET)
            bucket, mark = _place(hashed[i], num_buckets)
            slot = _found_in(bucket, mark, table, marks, owners)
            if slot < 0:
                slot = _found_in(_second(hashed[i], num_buckets), mark, table, marks, owners)
            # Bits that neither buckets nor prints were taken from.
            rows[i] = slot if slot >= 0 else -1 - _shared_row(hashed[i] >> uint64(16), size, mask)


@kernel
def count_ids(numbers, counts):
    """Count how often each number is given."""
    for number in numbers:
        counts[number] += 1


@kernel
def locate_rows(rows, starts, first_shared, locations):
    """Write where rows are, given table by table: slots by their number, shared rows behind them."""
    for table in range(len(starts) - 1):
        before = first_shared[table] - 1
        for i in range(starts[table], starts[table + 1]):
            locations[i] = rows[i] if rows[i] >= 0 else before - rows[i]


@register_jitable
def _empty_in(bucket, marks):
    """Return how many places of a bucket nobody has."""
    num_empty = 0
    for place in range(bucket * BUCKET, bucket * BUCKET + BUCKET):
        num_empty += marks[place] == 0
    return num_empty


@kernel
def list_newcomers(starts, hashed, rows, marks, newcomers, tables):
    """List ids without a slot where a bucket of theirs has an empty place, and tables; return how many."""
    num_buckets = len(marks) // BUCKET
    count = 0
    for table in range(len(starts) - 1):
        for i in range(starts[table], starts[table + 1]):
            if rows[i] < 0:
                bucket, _ = _place(hashed[i], num_buckets)
                if _empty_in(bucket, marks) or _empty_in(_second(hashed[i], num_buckets), marks):
                    newcomers[count], tables[count] = i, table
                    count += 1
    return count


@kernel
def seat_newcomers(hashed, tables, marks, owners, counts, slots, is_new):
    """Give ids, in the order given, an empty place in the emptier of their buckets: ``slots`` where new."""
    num_buckets = len(marks) // BUCKET
    for i in range(len(hashed)):
        is_new[i] = False
        first, mark = _place(hashed[i], num_buckets)
        second = _second(hashed[i], num_buckets)
        if (
            _found_in(first, mark, tables[i], marks, owners) >= 0
            or _found_in(second, mark, tables[i], marks, owners) >= 0
        ):
            continue  # an id that looks the same took one just now
        bucket = first if _empty_in(first, marks) >= _empty_in(second, marks) else second
        for place in range(bucket * BUCKET, bucket * BUCKET + BUCKET):
            if marks[place] == 0:
                marks[place], owners[place], counts[place] = mark, tables[i], 0
                slots[i], is_new[i] = place, True
                break


@register_jitable
def _estimate(first, second, sketch):
    return min(int64(sketch[0, first]), int64(sketch[1, second]))


@register_jitable
def _count_others(others, accesses, sketch):
    """Count ids without a slot; a cell grows no further than one of them needs, given what it was before.

    Such a conservative update keeps rare ids from looking popular together: most cells have several.
    """
    for n in range(len(others)):
        others[n, _BEFORE] = _estimate(others[n, _CELL], others[n, _OTHER_CELL], sketch)
    for n in range(len(others)):
        first, second = others[n, _CELL], others[n, _OTHER_CELL]
        needed = min(others[n, _BEFORE] + int64(accesses[others[n, _ID]]), _MOST_CELL)
        sketch[0, first] = uint8(max(int64(sketch[0, first]), needed))
        sketch[1, second] = uint8(max(int64(sketch[1, second]), needed))


@register_jitable
def _want(others, hashed, sketch, wanted, tables, estimates):
    """List ids without a slot; each bucket of the list keeps those of the highest estimates.

    Ties go to the higher hash, so that the order does not matter.
    """
    for n in range(len(others)):
        one, table, first = hashed[others[n, _ID]], others[n, _TABLE], others[n, _PLACE]
        estimate = _estimate(others[n, _CELL], others[n, _OTHER_CELL], sketch)
        least = first
        for place in range(first, first + BUCKET):
            if estimates[place] > 0 and wanted[place] == one and tables[place] == table:
                least = -1
                estimates[place] = max(int64(estimates[place]), estimate)
                break
            if estimates[place] < estimates[least] or (
                estimates[place] == estimates[least] and wanted[place] < wanted[least]
            ):
                least = place
        if least >= 0 and (
            estimate > estimates[least] or (estimate == estimates[least] and one > wanted[least])
        ):
            wanted[least], tables[least], estimates[least] = one, table, estimate


@kernel
def count_rows(starts, hashed, rows, accesses, counts, sketch, traffic, wanted, tables, estimates, others):
    """Count the accesses of a batch's distinct rows: of slots there, of all other ids in the sketch.

    Then list the other ids as wanted. ``others`` is room for `OTHERS` numbers of each: first all are asked of
    memory, which takes longer than what is done with them.
    """
    width, num_buckets = sketch.shape[1], len(wanted) // BUCKET
    counts_at, sketch_at, wanted_at = data_address(counts), data_address(sketch), data_address(wanted)
    tables_at, estimates_at = data_address(tables), data_address(estimates)
    count, last = 0, len(rows) - 1
    for table in range(len(starts) - 1):
        for i in range(starts[table], starts[table + 1]):
            prefetch_to_write(counts_at + 2 * max(rows[min(i + _AHEAD, last)], 0))
            if rows[i] >= 0:
                counts[rows[i]] = uint16(min(int64(counts[rows[i]]) + int64(accesses[i]), _MOST_SLOT))
                continue
            first, second = _cells(hashed[i], width)
            place = int64(((hashed[i] >> uint64(32)) * uint64(num_buckets)) >> uint64(32)) * BUCKET
            prefetch_to_write(sketch_at + first)
            prefetch_to_write(sketch_at + width + second)
            prefetch_to_write(wanted_at + 8 * place)
            prefetch_to_write(tables_at + tables.itemsize * place)
            prefetch_to_write(estimates_at + place)
            others[count, _ID], others[count, _TABLE], others[count, _PLACE] = i, table, place
            others[count, _CELL], others[count, _OTHER_CELL] = first, second
            traffic[table] += accesses[i]
            count += 1
    _count_others(others[:count], accesses, sketch)
    _want(others[:count], hashed, sketch, wanted, tables, estimates)


@register_jitable
def _decayed(count, factor, drawn):
    """Return a count times ``factor`` / 2**32, rounded up or down by a draw of 32 bits."""
    return (uint64(count) * factor + (drawn & uint64(0xFFFFFFFF))) >> uint64(32)


@kernel
def decay_counts(counts, sketch, factor, salt):
    """Decay all counts; rounding is a function of the place and the step."""
    for slot in range(len(counts)):
        if counts[slot]:
            counts[slot] = uint16(_decayed(counts[slot], factor, mix(salt + uint64(slot))))
    for row in range(sketch.shape[0]):
        other = mix(salt ^ uint64(row + 1))
        for cell in range(sketch.shape[1]):
            if sketch[row, cell]:
                sketch[row, cell] = uint8(_decayed(sketch[row, cell], factor, mix(other + uint64(cell))))


@kernel
def estimate_rows(hashed, sketch, estimates):
    """Write what the sketch knows of ids."""
    for i in range(len(hashed)):
        first, second = _cells(hashed[i], sketch.shape[1])
        estimates[i] = _estimate(first, second, sketch)


@register_jitable
def _least_in(bucket, counts, marks):
    """Return the place of a bucket that is empty, or has the lowest count; and that count, -1 if empty."""
    best, lowest = bucket * BUCKET, int64(1 << 30)
    for place in range(bucket * BUCKET, bucket * BUCKET + BUCKET):
        count = int64(-1) if marks[place] == 0 else int64(counts[place])
        if count < lowest:
            best, lowest = place, count
    return best, lowest


@kernel
def give_slots(hashed, tables, estimates, marks, owners, counts, slots, before):
    """Give slots to ids, in the order given, from empty places, or those that are clearly read less.

    ``slots`` gets each one's slot, -1 without; ``before`` the table that owned it, -1 if it was empty.
    """
    num_buckets = len(marks) // BUCKET
    for i in range(len(hashed)):
        slots[i], before[i] = -1, -1
        one, table = hashed[i], tables[i]
        bucket, mark = _place(one, num_buckets)
        other = _second(one, num_buckets)
        if (
            _found_in(bucket, mark, table, marks, owners) >= 0
            or _found_in(other, mark, table, marks, owners) >= 0
        ):
            continue  # an id that looks the same got one just now
        place, lowest = _least_in(bucket, counts, marks)
        place_there, lowest_there = _least_in(other, counts, marks)
        if lowest_there < lowest:
            place, lowest = place_there, lowest_there
        # A quarter more: counts that are about equal would hand a row to and fro, and it learns nothing.
        if int64(estimates[i]) <= lowest + (lowest >> 2):
            continue
        if marks[place]:
            before[i] = owners[place]
        slots[i] = place
        marks[place], owners[place] = mark, table
        counts[place] = uint16(estimates[i])
