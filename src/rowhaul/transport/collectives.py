"""Collectives made of messages between pairs of ranks.

Not Gloo's own: its rings take a hop for each rank, and add in an order that depends on the rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.transport.base import Bytes, check_summable, complete

if TYPE_CHECKING:
    from rowhaul.transport.gloo import GlooLinks

MAX_BYTES_VIA_FIRST = 4096  # larger messages are gathered without the detour by rank 0
SUM_TRIALS = 3  # of each algorithm, for tensors of a new size
# In messages of all pairs: above it, sending whole tensors to all takes too much memory, and is not faster.
MAX_BYTES_ALL_TO_ALL = 32 << 20


class PairwiseCollective:
    """Operations of all members of a group; used by one thread, as are the links.

    Args:
        links: between the members; nothing else may use them.
    """

    def __init__(self, links: GlooLinks) -> None:
        self._links = links
        self.rank, self.num_ranks = links.rank, links.num_ranks
        # Starting with the next rank, so that not all begin with the same one.
        self._peers = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        self._spare = torch.empty(0, dtype=torch.uint8)
        self._chosen_sums: dict[int, Callable[[Tensor], Tensor]] = {}  # by size

    def all_gather(self, mine: Bytes) -> npt.NDArray[np.uint8]:
        """Return the bytes of all ranks, ranks x length; the length is the same on all ranks."""
        own = as_tensor(np.ascontiguousarray(mine))
        everyone = torch.empty((self.num_ranks, mine.size), dtype=torch.uint8)
        if self.num_ranks > 2 and mine.size <= MAX_BYTES_VIA_FIRST:
            self._gather_via_first(everyone, own)
        else:
            self._gather(everyone, own)
        return everyone.numpy()

    def sum_in_rank_order(self, values: Tensor) -> None:
        """Replace a one-dimensional tensor by its sum over ranks, added in rank order: the same bits."""
        check_summable(values)
        if self.num_ranks == 1 or not values.numel():
            return
        own = values.detach().cpu().contiguous()
        total = self._sum_of_two(own) if self.num_ranks == 2 else self._quickest_sum(own)(own)
        if total.data_ptr() != values.data_ptr():
            values.detach().copy_(total)

    def _quickest_sum(self, own: Tensor) -> Callable[[Tensor], Tensor]:
        """Choose the fastest algorithm for tensors of this size; all give the same bits.

        Measured once per size: whether links or processors are the bottleneck depends on the cluster. The
        buffers of the trials are freed; those of the chosen one take a few times the tensors of all ranks.
        """
        size = own.nbytes.bit_length()  # sizes within a factor of two share a choice
        if size not in self._chosen_sums:
            algorithms = [self._sum_at_first, self._sum_slices]
            if self.num_ranks * (self.num_ranks - 1) << size <= MAX_BYTES_ALL_TO_ALL:
                algorithms.insert(0, self._sum_all)
            seconds = np.zeros(len(algorithms))
            for number, algorithm in enumerate(algorithms):
                taken = []
                for _ in range(SUM_TRIALS):
                    self.all_gather(np.zeros(1, np.uint8))  # a barrier
                    began = time.perf_counter()
                    algorithm(own.clone())
                    taken.append(time.perf_counter() - began)
                seconds[number] = min(taken)
            everyone = self.all_gather(seconds.view(np.uint8)).view(np.float64)
            self._chosen_sums[size] = algorithms[int(everyone.max(axis=0).argmin())]
            self._spare = torch.empty(0, dtype=torch.uint8)
            self._links.free_memory()
        return self._chosen_sums[size]

    def _sum_of_two(self, own: Tensor) -> Tensor:
        """The sum of two numbers does not depend on their order."""
        with self._links.swap(1 - self.rank, own, lambda: self._buffer(own, own.numel())) as theirs:
            return own.add_(theirs)

    def _sum_all(self, own: Tensor) -> Tensor:
        everyone = self._buffer(own, self.num_ranks * own.numel()).view(self.num_ranks, -1)
        self._gather(everyone, own)
        return _add_up(everyone)

    def _sum_at_first(self, own: Tensor) -> Tensor:
        """Rank 0 adds everything and sends the sum to all: the fewest messages."""
        if self.rank:
            total = self._buffer(own, own.numel())
            complete(self._links.start({0: total}, {0: own}))
            return total
        everyone = self._buffer(own, self.num_ranks * own.numel()).view(self.num_ranks, -1)
        self._receive_all(everyone, own)
        total = _add_up(everyone)
        self._links.start({}, dict.fromkeys(self._peers, total)).wait_sent()
        return total

    def _sum_slices(self, own: Tensor) -> Tensor:
        """Every rank adds one slice and sends its sum to all."""
        bounds = [own.numel() * rank // self.num_ranks for rank in range(self.num_ranks + 1)]
        lengths = [end - start for start, end in pairwise(bounds)]
        buffer = self._buffer(own, self.num_ranks * lengths[self.rank] + own.numel())
        to_add = buffer[: -own.numel()].view(self.num_ranks, lengths[self.rank])
        slices, totals = own.split(lengths), buffer[-own.numel() :].split(lengths)
        parts = self._links.start(
            {peer: to_add[peer] for peer in self._peers}, {peer: slices[peer] for peer in self._peers}
        )
        to_add[self.rank] = slices[self.rank]
        parts.wait_received()
        totals[self.rank].copy_(_add_up(to_add))
        sums = self._links.start(
            {peer: totals[peer] for peer in self._peers}, dict.fromkeys(self._peers, totals[self.rank])
        )
        sums.wait_received()
        parts.wait_sent()
        sums.wait_sent()
        return buffer[-own.numel() :]

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
        self._receive_all(everyone, own)
        self._links.start({}, dict.fromkeys(self._peers, everyone)).wait_sent()

    def _receive_all(self, everyone: Tensor, own: Tensor) -> None:
        """On rank 0: receive what all others send."""
        transfer = self._links.start({peer: everyone[peer] for peer in self._peers}, {})
        everyone[0] = own
        transfer.wait_received()

    def _buffer(self, like: Tensor, length: int) -> Tensor:
        """Reuse memory from call to call: fresh pages cost as much as the sum."""
        if self._spare.numel() < length * like.element_size():
            self._spare = torch.empty(length * like.element_size(), dtype=torch.uint8)
        return self._spare[: length * like.element_size()].view(like.dtype)


def as_tensor(data: Bytes) -> Tensor:
    """Share memory with an array; copy a read-only one, which PyTorch would warn about."""
    return torch.from_numpy(data if data.flags.writeable else data.copy())


def _add_up(parts: Tensor) -> Tensor:  # ranks x length; the first row becomes the sum
    for part in parts[1:]:
        parts[0] += part
    return parts[0]
