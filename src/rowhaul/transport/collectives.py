"""Collectives made of messages between pairs of ranks.

Not Gloo's own: its rings take a hop for each rank, and add in an order that depends on the rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.schedule.sum_plan import SumPlan
from rowhaul.transport.base import Bytes, RunningSum, Wire, check_summable, complete
from rowhaul.transport.calibration import measure_links
from rowhaul.transport.some_links import SomeLinks
from rowhaul.transport.sums.choice import candidates, in_buckets, settled, try_ways
from rowhaul.transport.sums.exchange import Exchange, Swap, bucket_ends, wire_bytes

if TYPE_CHECKING:
    from rowhaul.transport.gloo import GlooLinks

MAX_BYTES_VIA_FIRST = 4096  # larger messages are gathered without the detour by rank 0
# In messages of all pairs: above it, sending whole tensors to all takes too much memory, and is not faster.
MAX_BYTES_ALL_TO_ALL = 32 << 20
# Sums below are tried as they are; above, the links are measured first.
LEAST_BYTES_MEASURED = 4096
MEASURED_SECONDS, MOST_SECONDS = 0.3, 6.0  # of each pair, about, and of all


class PairwiseCollective:
    """Operations of all members of a group; used by one thread, as are the links.

    Args:
        links: between the members; nothing else may use them.
        memory: buffers to use from sum to sum; None: its own.
    """

    def __init__(self, links: GlooLinks | SomeLinks, memory: dict[str, Tensor] | None = None) -> None:
        self._links = links
        self.rank, self.num_ranks = links.rank, links.num_ranks
        # Starting with the next rank, so that not all begin with the same one.
        self._peers = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        self._memory = {} if memory is None else memory
        self._plans: dict[int, SumPlan] = {}  # by size: within a factor of two they share one
        self._given_speeds: list[float] | None = None
        self._speeds: list[float] | None = None
        self._is_measured = False
        self._among: dict[tuple[int, ...], PairwiseCollective] = {}

    def among(self, members: Sequence[int]) -> PairwiseCollective:
        """Return the collective of some members, numbered from 0; only they call it."""
        chosen = tuple(members)
        if chosen == tuple(range(self.num_ranks)):
            return self
        if chosen not in self._among:
            # One thread uses all of them, for one sum after the other: the same buffers do.
            made = PairwiseCollective(SomeLinks(self._links, chosen), self._memory)
            self._among[chosen] = made
            made._is_measured = self._is_measured
            made._given_speeds, made._speeds = (
                None if speeds is None else [speeds[one] for one in chosen]
                for speeds in (self._given_speeds, self._speeds)
            )
        return self._among[chosen]

    def choose_again(self, speeds: Sequence[float] | None = None) -> None:
        """Choose anew how to sum, over links of these speeds, or as they are measured now."""
        given = None if speeds is None else list(speeds)
        if given is not None and given == self._given_speeds:
            return  # nothing has changed
        self._given_speeds, self._speeds, self._is_measured = given, None, False
        self._plans.clear()
        self._among.clear()
        if given is None and self.num_ranks > 1:
            self._measure()

    @property
    def sent_bytes(self) -> Mapping[int, int]:
        """What was sent to each rank of the run so far."""
        return self._links.sent_bytes

    def all_gather(self, mine: Bytes) -> npt.NDArray[np.uint8]:
        """Return the bytes of all ranks, ranks x length; the length is the same on all ranks."""
        own = as_tensor(np.ascontiguousarray(mine))
        everyone = torch.empty((self.num_ranks, mine.size), dtype=torch.uint8)
        if self.num_ranks > 2 and mine.size <= MAX_BYTES_VIA_FIRST:
            self._gather_via_first(everyone, own)
        else:
            self._gather(everyone, own)
        return everyone.numpy()

    def broadcast(self, values: Bytes) -> None:
        """Replace the bytes of all ranks by those of rank 0, in place; as many on each."""
        data = torch.from_numpy(values)
        if self.rank:
            self._links.start({0: data}, {}).wait_received()
        else:
            self._links.start({}, dict.fromkeys(self._peers, data)).wait_sent()

    def sum_in_rank_order(self, values: Tensor) -> None:
        """Replace a one-dimensional tensor by its sum over ranks, added in rank order: the same bits."""
        check_summable(values)
        own = values.detach().cpu().contiguous()
        if self.num_ranks == 1 or not own.numel():
            return
        total = self._buffer("total", own.dtype, own.numel())
        self.start_sum(own, total).finish()
        values.detach().copy_(total)

    def bucket_ends(self, num_values: int, dtype: torch.dtype, wire: Wire | None = None) -> list[int]:
        """Return where the buckets of a sum end: one bucket until a sum of about this size was made."""
        wire = wire if self.num_ranks > 1 else None
        plan = self._plans.get(wire_bytes(num_values, dtype, wire).bit_length(), SumPlan())
        return bucket_ends(num_values, plan.buckets, wire)

    def start_sum(self, own: Tensor, total: Tensor, wire: Wire | None = None) -> RunningSum:
        """Start a sum whose values are sent bucket by bucket, see `RunningSum`."""
        check_summable(own)
        if self.num_ranks == 1:
            wire = None  # nothing travels
        if self._swaps and wire is None:
            return Swap(self._swap, own, total)
        num_bytes = wire_bytes(own.numel(), own.dtype, wire)
        plan = self._plans.get(num_bytes.bit_length())
        if plan is None:
            plan = self._plans[num_bytes.bit_length()] = self._choose(own, wire, num_bytes)
        return Exchange(self._links, plan, own, total, self._buffer, wire)

    def _swap(self, own: Tensor) -> contextlib.AbstractContextManager[Tensor]:
        return self._links.swap(1 - self.rank, own, lambda: self._buffer("swap", own.dtype, own.numel()))

    @property
    def _swaps(self) -> bool:
        """Whether two ranks read each other's memory."""
        return self.num_ranks == 2 and 1 - self.rank in self._links.pipes

    def _choose(self, own: Tensor, wire: Wire | None, num_bytes: int) -> SumPlan:
        """Choose the fastest way for tensors of this size; all give the same bits.

        The buffers of the trials are freed; those of the chosen one take a few times all ranks' tensors.
        """
        if self.num_ranks == 1:
            return SumPlan()
        if num_bytes >= LEAST_BYTES_MEASURED and not self._is_measured:
            self._measure()
        ways = candidates(self._speeds, self.num_ranks, num_bytes)
        if self.num_ranks * (self.num_ranks - 1) << num_bytes.bit_length() > MAX_BYTES_ALL_TO_ALL:
            ways = [one for one in ways if one.parts] or ways
        values, total = torch.zeros_like(own), torch.empty_like(own)

        def run(way: SumPlan) -> None:
            Exchange(self._links, way, values, total, self._buffer, wire).finish()

        chosen = try_ways(ways, run, self.all_gather)
        self._memory.clear()
        self._links.free_memory()
        if self._speeds is None:
            return chosen
        return in_buckets(chosen, chosen.seconds(self._speeds, num_bytes))

    def _measure(self) -> None:
        """Measure the members' links, unless speeds are given; ranks of one host alone have none."""
        self._is_measured = True
        known = np.zeros(self.num_ranks + 1, np.uint8)
        known[list(self._links.pipes)] = 1
        known[-1] = self._given_speeds is not None
        every = self.all_gather(known).astype(bool)
        within_host, are_given = every[:, :-1], every[:, -1]
        np.fill_diagonal(within_host, True)
        if within_host.all():
            return
        if self._given_speeds is not None and are_given.all():
            self._speeds = settled(self._given_speeds)
            return
        seconds = min(MEASURED_SECONDS, MOST_SECONDS / self.num_ranks)
        measured = measure_links(self._links, self, seconds_per_pair=seconds)
        between = np.where(within_host, 0.0, measured.both_ways_bytes_per_second)
        self._speeds = settled(between.max(axis=1).tolist())

    def _gather(self, everyone: Tensor, own: Tensor) -> None:
        transfer = self._links.start(
            {peer: everyone[peer] for peer in self._peers}, dict.fromkeys(self._peers, own)
        )
        everyone[self.rank] = own
        complete(transfer)

    def _gather_via_first(self, everyone: Tensor, own: Tensor) -> None:
        """Gather at rank 0, which sends the result to all: two hops, and far fewer messages."""
        if self.rank:
            complete(self._links.start({0: everyone}, {0: own}))
            return
        transfer = self._links.start({peer: everyone[peer] for peer in self._peers}, {})
        everyone[0] = own
        transfer.wait_received()
        self._links.start({}, dict.fromkeys(self._peers, everyone)).wait_sent()

    def _buffer(self, name: str, dtype: torch.dtype, length: int) -> Tensor:
        """Reuse memory from call to call: fresh pages cost as much as the sum."""
        num_bytes = length * dtype.itemsize
        if name not in self._memory or self._memory[name].numel() < num_bytes:
            self._memory[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[name][:num_bytes].view(dtype)


def as_tensor(data: Bytes) -> Tensor:
    """Share memory with an array; copy a read-only one, which PyTorch would warn about."""
    return torch.from_numpy(data if data.flags.writeable else data.copy())
