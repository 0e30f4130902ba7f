"""The files that plans are packed into, used again: new memory costs more than what is written into it.

A reader maps a file and gives it back when nothing refers to the plan any more. Until all of its readers
have, the next plan goes elsewhere; who keeps plans for good keeps their files, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from rowhaul.planning.packing import new_file, pack, pack_into
from rowhaul.planning.planner import PlannedBatch

ONCE = 0  # the number of files that nobody gives back
_MOST_FILES = 8  # that are kept; a plan is out of use some three plans later


class PackedFile(NamedTuple):
    """A plan in a file."""

    number: int
    descriptor: int
    size: int


class PlanFiles:
    """Files by number, and who has each; for one thread."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}
        self._readers: dict[int, set[int]] = {}

    def pack(self, planned: PlannedBatch, readers: Iterable[int]) -> PackedFile:
        """Write a plan into a file for these readers; one of number `ONCE` is the caller's to close."""
        number = next((one for one, having in self._readers.items() if not having), ONCE)
        if number == ONCE and len(self._descriptors) < _MOST_FILES:
            number = len(self._descriptors) + 1
            self._descriptors[number] = new_file()
        if number == ONCE:
            return PackedFile(ONCE, *pack(planned))
        size = pack_into(self._descriptors[number], planned)
        self._readers[number] = set(readers)
        return PackedFile(number, self._descriptors[number], size)

    def give_back(self, number: int, reader: int) -> None:
        """A reader does not look at a file any more."""
        if number in self._readers:
            self._readers[number].discard(reader)

    def close(self) -> None:
        """Close all files; who has one mapped keeps what is in it."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._readers.clear()
