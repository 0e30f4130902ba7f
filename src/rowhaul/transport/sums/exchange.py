"""Carries out a `SumPlan`, bucket by bucket, so that a sum may begin before all of its values are known.

Values are collected first and added in rank order then, so the way they take does not change a bit. Between
two ranks messages have one order: the parts of a bucket, then the sums of the bucket before. Both are posted
ahead, and a rank sends the next bucket's parts before it waits for this one's.

With a narrower *wire* type, values are rounded when sent and sums are rounded when sent back, on their own
rank too: the result is not exact, but the same on all ranks, and whichever way it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from rowhaul.schedule.sum_plan import SumPlan
from rowhaul.transport.base import Transfer, Wire


class TensorLinks(Protocol):
    """Messages of tensors between the ranks of a sum."""

    rank: int
    num_ranks: int

    def start(self, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> Transfer:
        """Start messages, receives first; empty ones are not sent, as both ends know."""


class Swap:
    """A sum of two ranks that read each other's memory: one bucket, and one copy less.

    Args:
        swap: sends a tensor and gives access to the other rank's.
        own: this rank's values.
        total: receives the sum.
    """

    def __init__(
        self, swap: Callable[[Tensor], AbstractContextManager[Tensor]], own: Tensor, total: Tensor
    ) -> None:
        self.ends = [own.numel()]
        self._swap, self._own, self._total = swap, own, total
        self._is_done = False

    def send_next(self) -> None:
        """Sum: the values are there."""
        with self._swap(self._own) as theirs:  # the sum of two numbers does not depend on their order
            torch.add(self._own, theirs, out=self._total)
        self._is_done = True

    def finish(self) -> None:
        """Sum, unless that is done."""
        if not self._is_done:
            self.send_next()


class Exchange:
    """One sum in progress, over the links of this rank; all ranks make the same calls.

    Args:
        links: between the ranks; used by one thread, as this is.
        plan: the way to sum.
        own: this rank's values, one-dimensional; each bucket must be there when it is sent.
        total: receives the sum; other memory than ``own``.
        allocate: returns memory by name, type and number of values; may reuse it from sum to sum.
        wire: how values travel; as they are if None.
    """

    def __init__(
        self,
        links: TensorLinks,
        plan: SumPlan,
        own: Tensor,
        total: Tensor,
        allocate: Callable[[str, torch.dtype, int], Tensor],
        wire: Wire | None = None,
    ) -> None:
        self.ends = bucket_ends(own.numel(), plan.buckets, wire)
        self._links, self._plan, self._own, self._total = links, plan, own, total
        # Starting with the next rank, so that not all begin with the same one.
        self._peers = [(links.rank + step) % links.num_ranks for step in range(1, links.num_ranks)]
        self._rounded = wire.count if wire is not None else 0
        narrow = own.dtype if wire is None else wire.dtype
        # What was rounded, in its own memory: values to send, and sums.
        self._sent, self._summed = (allocate(name, narrow, self._rounded) for name in ("sent", "summed"))
        self._inbox = [
            allocate(name, dtype, links.num_ranks * size)
            for name, dtype, size in zip(("narrow", "whole"), (narrow, own.dtype), self._sizes(), strict=True)
        ]
        self._places = [0, 0]  # used up of each inbox
        self._next = 0
        self._under_way: list[Transfer] = []
        self._pending: tuple[Tensor, Transfer] | None = None  # parts to add of the bucket sent last

    def send_next(self) -> None:
        """Send the next bucket, whose values are there; then add up the one before."""
        begin, end = self._bucket(self._next)
        here, _ = self._from(begin, end)
        if begin < self._rounded:
            here.copy_(self._own[begin:end])
        mine, to_each = self._cut(here)
        inbox = self._take_inbox(begin, mine.numel())
        sums = self._receive_sums(self._next - 1)
        parts = self._links.start({peer: inbox[peer] for peer in self._peers}, {})
        arriving = self._links.start(sums, {})
        sent = self._links.start({}, {peer: to_each[peer] for peer in self._peers})
        inbox[self._links.rank] = mine
        self._under_way += [arriving, sent]
        self._add_up()
        self._pending = inbox, parts
        self._next += 1

    def finish(self) -> None:
        """Send whatever has not been sent; return when the sum is complete."""
        while self._next < len(self.ends):
            self.send_next()
        sums = self._receive_sums(self._next - 1)
        self._under_way.append(self._links.start(sums, {}))
        self._add_up()
        for transfer in self._under_way:
            transfer.wait_received()
        for transfer in self._under_way:
            transfer.wait_sent()
        if self._rounded:
            self._total[: self._rounded].copy_(self._summed)

    def _add_up(self) -> None:
        """Add the parts of the bucket before the latest, in rank order, and send the sum."""
        if self._pending is None:
            return
        inbox, parts = self._pending
        parts.wait_received()
        _, there = self._from(*self._bucket(self._next - 1))
        sums, _ = self._cut(there)
        add_in_order(inbox, sums, self._own.dtype)
        if self._plan.parts:
            self._under_way.append(self._links.start({}, dict.fromkeys(self._peers, sums)))

    def _receive_sums(self, bucket: int) -> dict[int, Tensor]:
        if bucket < 0 or not self._plan.parts:
            return {}
        _, there = self._from(*self._bucket(bucket))
        _, from_each = self._cut(there)
        return {peer: from_each[peer] for peer in self._peers}

    def _bucket(self, number: int) -> tuple[int, int]:
        return self.ends[number - 1] if number else 0, self.ends[number]

    def _from(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """What to send of a bucket, and where its sum goes."""
        source, target = (self._sent, self._summed) if begin < self._rounded else (self._own, self._total)
        return source[begin:end], target[begin:end]

    def _cut(self, bucket: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """This rank's part of a bucket, and that of each rank."""
        if not self._plan.parts:
            return bucket, [bucket] * self._links.num_ranks
        bounds = self._plan.bounds(0, bucket.numel())
        parts = bucket.split([end - begin for begin, end in pairwise(bounds)])
        return parts[self._links.rank], parts

    def _sizes(self) -> tuple[int, int]:
        """This rank's parts of all buckets: rounded values, and others."""
        sizes = [0, 0]
        for begin, end in pairwise((0, *self.ends)):
            bounds, rank = self._plan.bounds(begin, end), self._links.rank
            size = bounds[rank + 1] - bounds[rank] if self._plan.parts else end - begin
            sizes[begin >= self._rounded] += size
        return sizes[0], sizes[1]

    def _take_inbox(self, begin: int, length: int) -> Tensor:
        kind, count = int(begin >= self._rounded), self._links.num_ranks * length
        place = self._places[kind]
        self._places[kind] += count
        return self._inbox[kind][place : place + count].view(self._links.num_ranks, length)


def add_in_order(parts: Tensor, out: Tensor, dtype: torch.dtype) -> None:  # ranks x values
    """Add up the values of all ranks, in rank order and in this type; round the sum to that of ``out``."""
    if not out.numel():
        return
    if len(parts) == 1:
        out.copy_(parts[0])
    elif parts.dtype == dtype:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out += part
    else:
        wide = parts[0].to(dtype)
        for part in parts[1:]:
            wide += part
        out.copy_(wide)


def bucket_ends(num_values: int, buckets: int, wire: Wire | None = None) -> list[int]:
    """Where each bucket ends; values that are rounded share none with others."""
    if wire is None or not 0 < wire.count < num_values:
        return [num_values * number // buckets for number in range(1, buckets + 1)]
    rounded = [wire.count * number // buckets for number in range(1, buckets + 1)]
    return [*rounded, num_values]


def wire_bytes(num_values: int, dtype: torch.dtype, wire: Wire | None = None) -> int:
    """The bytes of a tensor as it travels."""
    if wire is None:
        return num_values * dtype.itemsize
    rounded = min(wire.count, num_values)
    return (num_values - rounded) * dtype.itemsize + rounded * wire.dtype.itemsize
