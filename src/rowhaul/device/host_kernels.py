"""Compiled loops over the rows behind a card's cache: several threads run them side by side."""

from __future__ import annotations

from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, prefetch_to_read, prefetch_to_write, record_address
from rowhaul.store.index_kernels import find_each_key

_AHEAD = 12  # rows


@kernel
def read_known(index, seen, tables, keys, addresses, shift, record_bytes, out_address, locations):
    """Copy the rows of keys to their places from an address on, and write where they are, or -1.

    Returns how many could not be looked up now: call it again.
    """
    num_busy, last = find_each_key(index, seen, tables, keys, locations), len(keys) - 1
    for i in range(len(keys)):
        soon = locations[min(i + _AHEAD, last)]
        if soon >= 0:
            prefetch_to_read(record_address(addresses, shift, record_bytes, soon))
        if locations[i] >= 0:
            address = record_address(addresses, shift, record_bytes, locations[i])
            copy_bytes(out_address + i * record_bytes, address, record_bytes)
    return num_busy


@kernel
def fetch_known(
    index, seen, tables, keys, addresses, shift, record_bytes, out_address, locations, slots, unborn, homes,
    names,
):  # fmt: skip
    """The same for rows that go to records of a card: notes their homes; ``unborn``, and names, if none."""
    num_busy = read_known(index, seen, tables, keys, addresses, shift, record_bytes, out_address, locations)
    for i in range(len(slots)):
        slot = slots[i]
        if locations[i] >= 0:
            homes[slot] = locations[i]
        else:
            homes[slot] = unborn
            names[slot, 0] = keys[i]
            names[slot, 1] = tables[i]
    return num_busy


@kernel
def write_known(addresses, shift, record_bytes, slots, homes, left_home, in_address, locations):
    """Overwrite the rows that records of a card have in host memory; returns how many have none.

    Writes where they are to ``locations``; records whose rows leave the card get ``left_home`` then.
    """
    num_homeless, last = 0, len(slots) - 1
    for i in range(len(slots)):
        soon = homes[slots[min(i + _AHEAD, last)]]
        if soon >= 0:
            prefetch_to_write(record_address(addresses, shift, record_bytes, soon))
        home = locations[i] = homes[slots[i]]
        if left_home < 0:
            homes[slots[i]] = left_home
        if home >= 0:
            address = record_address(addresses, shift, record_bytes, home)
            copy_bytes(address, in_address + i * record_bytes, record_bytes)
        else:
            num_homeless += 1
    return num_homeless
