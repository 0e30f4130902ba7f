"""Links and collectives made of messages between pairs of ranks.

Collectives are messages too, since Gloo's own rings take a hop a rank, and add up in an order that
depends on the rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rowhaul.transport.base import Bytes, check_buffers
from rowhaul.transport.gloo import Message, Pairs
from rowhaul.transport.pipe_setup import form_pipes

MAX_BYTES_VIA_FIRST = 4096  # what ranks gather by way of rank 0
SUM_TRIALS = 3  # of each way of summing, for tensors of a new size


def connect_pairs(group: dist.ProcessGroup, host: str | None = None, timeout: float | None = None) -> Pairs:
    """The pairs of a group's ranks, those of one host by pipes; all ranks of the group call this together.

    Args:
        group: the process group; nothing else may use it.
        host: a name that the ranks of one host share, to tell apart ranks that could share memory.
        timeout: seconds that a message of one host may take to come; between hosts that of the group holds.
    """
    pairs = Pairs(group)
    if not pairs.uses_gpu and pairs.num_ranks > 1:
        pairs.pipes = form_pipes(pairs.rank, RankCollective(pairs).all_gather, pairs.names, host, timeout)
    return pairs


class RankTransfer:
    """The messages of one post."""

    def __init__(
        self, received: list[Message], sent: list[Message], staged: list[tuple[Tensor, Tensor]]
    ) -> None:
        self._received = received
        self._sent = sent
        self._staged = staged

    def wait_received(self) -> None:
        """Return when everything to be received is there."""
        _wait_for_all(self._received)
        for buffer, arrived in self._staged:
            buffer.copy_(arrived)

    def wait_sent(self) -> None:
        """Return when the sent buffers may be used again."""
        _wait_for_all(self._sent)


def _wait_for_all(messages: list[Message]) -> None:
    for message in messages:
        message.wait()


def _writable(data: Bytes) -> Bytes:
    """The data, or a copy where PyTorch would warn that it does not know read-only memory."""
    return data if data.flags.writeable else data.copy()


class RankLinks:
    """Point-to-point messages between the ranks of a group; used by one thread, as are the pairs."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self.rank = self._pairs.rank
        self.num_ranks = self._pairs.num_ranks

    def post(self, receives: Mapping[int, Bytes], sends: Mapping[int, Bytes]) -> RankTransfer:
        """Start one message from and to each of the given ranks, receives first; does not wait."""
        check_buffers(self.rank, self.num_ranks, receives, sends)
        arriving = {peer: torch.from_numpy(data) for peer, data in receives.items()}
        leaving = {peer: torch.from_numpy(_writable(data)) for peer, data in sends.items()}
        staged = []
        if self._pairs.uses_gpu:
            buffers = arriving
            arriving = {
                peer: torch.empty_like(data, device=self._pairs.device) for peer, data in buffers.items()
            }
            leaving = {peer: data.to(self._pairs.device) for peer, data in leaving.items()}
            staged = [(buffers[peer], arriving[peer]) for peer in buffers]
        return RankTransfer(*self._pairs.start(arriving, leaving), staged)


class RankCollective:
    """What the members of a group do together; used by one thread, as are the pairs."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self.rank = self._pairs.rank
        self.num_ranks = self._pairs.num_ranks
        # Starting with the next rank, so that not all begin with the same one.
        self._peers = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        self._spare = torch.empty(0, dtype=torch.uint8, device=self._pairs.device)
        self._chosen_sums: dict[int, Callable[[Tensor], Tensor]] = {}  # by size

    def all_gather(self, mine: Bytes) -> npt.NDArray[np.uint8]:
        """Everyone's bytes, ranks x length; the length is the same on all ranks."""
        own = torch.from_numpy(_writable(np.ascontiguousarray(mine))).to(self._pairs.device)
        everyone = torch.empty((self.num_ranks, mine.size), dtype=torch.uint8, device=own.device)
        if self.num_ranks > 2 and mine.size <= MAX_BYTES_VIA_FIRST:
            self._gather_via_first(everyone, own)
        else:
            self._gather(everyone, own)
        gathered: npt.NDArray[np.uint8] = everyone.cpu().numpy()
        return gathered

    def sum_in_rank_order(self, values: Tensor) -> None:
        """Replace a one-dimensional tensor by the sum over ranks, added up from rank 0 on: the same bits."""
        if values.ndim != 1:
            raise ValueError(
                f"a sum over ranks takes a one-dimensional tensor; got shape {tuple(values.shape)}"
            )
        if self.num_ranks == 1 or not values.numel():
            return
        own = values.detach().to(self._pairs.device).contiguous()
        total = self._sum_of_two(own) if self.num_ranks == 2 else self._quickest_sum(own)(own)
        if total.data_ptr() != values.data_ptr():
            values.detach().copy_(total)

    def _quickest_sum(self, own: Tensor) -> Callable[[Tensor], Tensor]:
        """The way of summing that is quickest here for tensors of this size: all give the same bits.

        Tried once: whether a link's time or a processor's is dearer depends on the cluster.
        """
        size = own.nbytes.bit_length()  # sizes within a factor of two are taken to be alike
        if size not in self._chosen_sums:
            ways = (self._sum_all, self._sum_at_first, self._sum_slices)
            seconds = np.zeros(len(ways))
            for number, way in enumerate(ways):
                taken = []
                for _ in range(SUM_TRIALS):
                    self.all_gather(np.zeros(1, np.uint8))  # all begin together
                    began = time.perf_counter()
                    way(own.clone())
                    taken.append(time.perf_counter() - began)
                seconds[number] = min(taken)
            everyone = self.all_gather(seconds.view(np.uint8)).view(np.float64)
            self._chosen_sums[size] = ways[int(everyone.max(axis=0).argmin())]
        return self._chosen_sums[size]

    def _sum_of_two(self, own: Tensor) -> Tensor:
        """Of two numbers either may come first."""
        with self._pairs.swap(1 - self.rank, own, lambda: self._buffer(own, own.numel())) as theirs:
            return own.add_(theirs)

    def _sum_all(self, own: Tensor) -> Tensor:
        everyone = self._buffer(own, self.num_ranks * own.numel()).view(self.num_ranks, -1)
        self._gather(everyone, own)
        return _add_up(everyone)

    def _sum_at_first(self, own: Tensor) -> Tensor:
        """Rank 0 adds everything up, and sends the sum to everyone: the fewest messages."""
        if self.rank:
            total = self._buffer(own, own.numel())
            received, sent = self._pairs.start({0: total}, {0: own})
            _wait_for_all(received + sent)
            return total
        everyone = self._buffer(own, self.num_ranks * own.numel()).view(self.num_ranks, -1)
        received, _ = self._pairs.start({peer: everyone[peer] for peer in self._peers}, {})
        everyone[0] = own
        _wait_for_all(received)
        total = _add_up(everyone)
        _, sent = self._pairs.start({}, dict.fromkeys(self._peers, total))
        _wait_for_all(sent)
        return total

    def _sum_slices(self, own: Tensor) -> Tensor:
        """Everyone adds up one slice, and sends the sum to everyone."""
        bounds = [own.numel() * rank // self.num_ranks for rank in range(self.num_ranks + 1)]
        lengths = [end - start for start, end in pairwise(bounds)]
        buffer = self._buffer(own, self.num_ranks * lengths[self.rank] + own.numel())
        to_add = buffer[: -own.numel()].view(self.num_ranks, lengths[self.rank])
        slices, totals = own.split(lengths), buffer[-own.numel() :].split(lengths)
        received, sent = self._pairs.start(
            {peer: to_add[peer] for peer in self._peers}, {peer: slices[peer] for peer in self._peers}
        )
        to_add[self.rank] = slices[self.rank]
        _wait_for_all(received)
        totals[self.rank].copy_(_add_up(to_add))
        received, sums_sent = self._pairs.start(
            {peer: totals[peer] for peer in self._peers}, dict.fromkeys(self._peers, totals[self.rank])
        )
        _wait_for_all(received + sent + sums_sent)
        return buffer[-own.numel() :]

    def _gather(self, everyone: Tensor, own: Tensor) -> None:
        received, sent = self._pairs.start(
            {peer: everyone[peer] for peer in self._peers}, dict.fromkeys(self._peers, own)
        )
        everyone[self.rank] = own
        _wait_for_all(received)
        _wait_for_all(sent)

    def _gather_via_first(self, everyone: Tensor, own: Tensor) -> None:
        """Everything goes to rank 0 and from there to everyone: twice the way, and far fewer messages."""
        if self.rank:
            received, sent = self._pairs.start({0: everyone}, {0: own})
        else:
            received, _ = self._pairs.start({peer: everyone[peer] for peer in self._peers}, {})
            everyone[0] = own
            _wait_for_all(received)
            received, sent = self._pairs.start({}, dict.fromkeys(self._peers, everyone))
        _wait_for_all(received)
        _wait_for_all(sent)

    def _buffer(self, like: Tensor, length: int) -> Tensor:
        """Memory that is kept from call to call: fresh pages cost as much as the sum."""
        if self._spare.numel() < length * like.element_size():
            self._spare = torch.empty(length * like.element_size(), dtype=torch.uint8, device=like.device)
        return self._spare[: length * like.element_size()].view(like.dtype)


def _add_up(parts: Tensor) -> Tensor:  # ranks x length; the first row becomes the sum
    for part in parts[1:]:
        parts[0] += part
    return parts[0]
