"""A transport between ranks that are threads of one process, for tests and for compiling kernels.

The same interface and the same waits as over a network: a test runs a whole cluster in one process, with
any interleaving. Where the real transport leaves freedom, this one takes all of it: a payload is copied as
late as allowed, at the first wait of either end, to expose buffers that are used before the wait.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.transport.base import Bytes, Groups, LinkError, Membership, Wire, check_buffers, check_summable
from rowhaul.transport.sums.exchange import bucket_ends

BUCKETS = 3  # of every sum
WAIT_SECONDS = 400.0  # a rank may have to compile kernels first: minutes on a busy machine


class InProcessNetwork:
    """Connects the ranks of one process; a `Transport`.

    As with ``torch.distributed.new_group``, the n-th links (or the n-th collective of the same members)
    that each rank requests belong together, and every rank requests each once.

    Args:
        num_ranks: the number of ranks.
        delay: called, outside any lock, at every post, wait and collective; a stress test sleeps in it.
        timeout_seconds: limit of a wait; a longer one raises an error that says what is missing.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        delay: Callable[[], None] | None = None,
        timeout_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.num_ranks = num_ranks
        self.timeout_seconds = timeout_seconds
        self.delay: Callable[[], None] = delay or (lambda: None)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._groups_made: defaultdict[tuple[Any, ...], int] = defaultdict(int)
        # Messages posted by one end only, by group, sender and receiver; of one end at a time.
        self._unmatched: defaultdict[tuple[int, int, int], deque[_Message]] = defaultdict(deque)
        self._rounds: defaultdict[tuple[Any, ...], _Round] = defaultdict(_Round)

    def connect(self, membership: Membership) -> Groups:
        """Make the groups of one rank; every rank calls this once."""
        rank, workers = membership.rank, range(membership.topology.num_workers)
        moves, control = self.links(rank), self.collective(rank)
        dense = self.collective(rank, workers) if rank in workers else None
        return Groups(moves, dense, control, self.links(rank))

    def links(self, rank: int) -> InProcessLinks:
        """Return new links of one rank to all others."""
        return InProcessLinks(self, rank, self._next_group("links", rank))

    def collective(self, rank: int, members: Sequence[int] | None = None) -> InProcessCollective:
        """Return one rank's end of a group of the given ranks, or of all."""
        chosen = tuple(range(self.num_ranks) if members is None else members)
        if rank not in chosen:
            raise ValueError(f"rank {rank} is not among the members {list(chosen)} of the collective")
        return InProcessCollective(self, chosen.index(rank), chosen, self._next_group(chosen, rank))

    def fail(self, error: BaseException) -> None:
        """Raise an error in all current and later waits; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _next_group(self, kind: object, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"the network has ranks 0 to {self.num_ranks - 1}; got {rank}")
        with self._changed:
            self._groups_made[kind, rank] += 1
            return self._groups_made[kind, rank]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait_until(self, happened: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait for another rank; the caller holds the condition."""
        if not self._changed.wait_for(lambda: self._error is not None or happened(), self.timeout_seconds):
            raise LinkError(f"{what()} did not arrive within {self.timeout_seconds:g} s")
        self._check()


@dataclass
class _Message:
    """One payload, from the first post of either end until it is copied."""

    sender: int
    receiver: int
    source: Bytes | None = None
    destination: Bytes | None = None
    is_delivered: bool = False

    @property
    def is_matched(self) -> bool:
        return self.source is not None and self.destination is not None

    def deliver(self) -> None:
        """Copy the payload at the first wait of either end."""
        if self.is_delivered:
            return
        assert self.source is not None
        assert self.destination is not None
        if self.source.size != self.destination.size:
            raise LinkError(
                f"rank {self.sender} sent {self.source.size:,} bytes to rank {self.receiver}, which expected "
                f"{self.destination.size:,}: both must follow the same plan"
            )
        self.destination[...] = self.source
        self.is_delivered = True


class InProcessLinks:
    """The point-to-point messages of one rank; used by one thread."""

    def __init__(self, network: InProcessNetwork, rank: int, group: int) -> None:
        self.rank = rank
        self.num_ranks = network.num_ranks
        self.near = frozenset(range(network.num_ranks)) - {rank}
        self._network = network
        self._group = group

    def post(self, receives: Mapping[int, Bytes], sends: Mapping[int, Bytes]) -> InProcessTransfer:
        """Start one message from and to each of the given ranks; does not wait. Empty ones are not sent."""
        check_buffers(self.rank, self.num_ranks, receives, sends)
        network = self._network
        network.delay()
        with network._changed:
            network._check()
            here = self.rank
            received = {
                p: self._match(p, here, "destination", data) for p, data in receives.items() if data.size
            }
            sent = {p: self._match(here, p, "source", data) for p, data in sends.items() if data.size}
            network._changed.notify_all()
        return InProcessTransfer(network, self.rank, received, sent)

    def _match(self, sender: int, receiver: int, end: str, data: Bytes) -> _Message:
        """Find the message that the other end has posted, or queue a new one."""
        queue = self._network._unmatched[self._group, sender, receiver]
        if queue and getattr(queue[0], end) is None:
            message = queue.popleft()
        else:
            message = _Message(sender, receiver)
            queue.append(message)
        setattr(message, end, data)
        return message


@dataclass(frozen=True)
class InProcessTransfer:
    """The messages of one post."""

    network: InProcessNetwork
    rank: int
    received: dict[int, _Message]
    sent: dict[int, _Message]

    def wait_received(self) -> None:
        """Return when all receives are complete."""
        self._wait(self.received, "from")

    def wait_sent(self) -> None:
        """Return when the sent buffers may be reused: the peers have the bytes."""
        self._wait(self.sent, "to")

    def _wait(self, messages: dict[int, _Message], direction: str) -> None:
        network = self.network
        network.delay()
        with network._changed:
            network._check()
            for peer in list(messages):
                self._wait_for(messages[peer], f"rank {self.rank}: the message {direction} rank {peer}")
                del messages[peer]

    def _wait_for(self, message: _Message, what: str) -> None:
        self.network._wait_until(lambda: message.is_matched, lambda: what)
        message.deliver()


@dataclass
class _Round:
    """One collective operation: its inputs and its result."""

    inputs: dict[int, Any] = field(default_factory=dict)  # by rank
    kinds: dict[int, str] = field(default_factory=dict)
    result: Any = None  # or a `LinkError`
    num_taken: int = 0


class InProcessCollective:
    """One member's end of a group; used by one thread."""

    def __init__(self, network: InProcessNetwork, rank: int, members: tuple[int, ...], group: object) -> None:
        self.rank = rank
        self.num_ranks = len(members)
        self._network = network
        self._members = members
        self._group = group
        self._num_rounds = 0
        self._among: dict[tuple[int, ...], InProcessCollective] = {}

    def all_gather(self, mine: Bytes) -> npt.NDArray[np.uint8]:
        """Return the bytes of all ranks, ranks x length; the length is the same on all ranks."""
        kind = f"all_gather of {mine.size:,} bytes"
        gathered: npt.NDArray[np.uint8] = self._together(kind, mine.copy(), np.stack)
        return gathered.copy()

    def broadcast(self, values: Bytes) -> None:
        """Replace the bytes of all ranks by those of rank 0, in place; as many on each."""
        kind = f"broadcast of {values.size:,} bytes"
        values[:] = self._together(kind, values.copy(), lambda parts: parts[0])

    def sum_in_rank_order(self, values: Tensor) -> None:
        """Replace a one-dimensional tensor by its sum over ranks, added in rank order: the same bits."""
        check_summable(values)
        kind = f"sum_in_rank_order of {values.numel():,} {values.dtype}"
        values.detach().copy_(self._together(kind, values.detach().clone(), lambda parts: reduce(add, parts)))

    def bucket_ends(self, num_values: int, dtype: torch.dtype, wire: Wire | None = None) -> list[int]:
        """Return where the buckets of a sum end: always several, so that tests have them."""
        return bucket_ends(num_values, BUCKETS, wire)

    def start_sum(self, own: Tensor, total: Tensor, wire: Wire | None = None) -> InProcessSum:
        """Start to sum a tensor in rank order into another one."""
        check_summable(own)
        return InProcessSum(self, own, total, wire if self.num_ranks > 1 else None)

    def choose_again(self, speeds: Sequence[float] | None = None) -> None:
        """Do nothing: there is one way to sum."""

    def among(self, members: Sequence[int]) -> InProcessCollective:
        """Return the collective of some members, numbered from 0; only they call it."""
        chosen = tuple(self._members[one] for one in members)
        if chosen == self._members:
            return self
        if chosen not in self._among:
            me = self._members[self.rank]
            self._among[chosen] = InProcessCollective(
                self._network, chosen.index(me), chosen, (self._members, self._group)
            )
        return self._among[chosen]

    def _together(self, kind: str, mine: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Wait for all members; the last one to arrive combines their inputs."""
        network = self._network
        network.delay()
        self._num_rounds += 1
        key = (self._members, self._group, self._num_rounds)
        with network._changed:
            network._check()
            current = network._rounds[key]
            current.inputs[self.rank], current.kinds[self.rank] = mine, kind
            if len(current.inputs) == self.num_ranks:
                current.result = self._combine(current, combine)
                network._changed.notify_all()
            network._wait_until(
                lambda: current.result is not None, lambda: f"{kind}: {self._missing(current)}"
            )
            current.num_taken += 1
            if current.num_taken == self.num_ranks:
                del network._rounds[key]
        if isinstance(current.result, LinkError):
            raise current.result
        return current.result

    def _combine(self, current: _Round, combine: Callable[[list[Any]], Any]) -> Any:
        if len(set(current.kinds.values())) == 1:
            return combine([current.inputs[rank] for rank in range(self.num_ranks)])
        calls = "; ".join(
            f"rank {self._members[rank]}: {kind}" for rank, kind in sorted(current.kinds.items())
        )
        return LinkError(f"the members of a collective called it differently: {calls}")

    def _missing(self, current: _Round) -> str:
        absent = [member for rank, member in enumerate(self._members) if rank not in current.inputs]
        return f"ranks {absent} of the members {list(self._members)}"


class InProcessSum:
    """A sum in progress, a collective operation for each bucket."""

    def __init__(
        self, collective: InProcessCollective, own: Tensor, total: Tensor, wire: Wire | None
    ) -> None:
        self.ends = collective.bucket_ends(own.numel(), own.dtype, wire)
        self._collective, self._own, self._total, self._wire = collective, own, total, wire
        self._done = 0

    def send_next(self) -> None:
        """Sum the next bucket."""
        begin = self.ends[self._done - 1] if self._done else 0
        bucket = self._own[begin : self.ends[self._done]]
        if self._wire is not None and begin < self._wire.count:
            bucket = bucket.to(self._wire.dtype).to(self._own.dtype)
        else:
            bucket = bucket.clone()
        self._collective.sum_in_rank_order(bucket)
        if self._wire is not None and begin < self._wire.count:
            bucket = bucket.to(self._wire.dtype)
        self._total[begin : self.ends[self._done]] = bucket
        self._done += 1

    def finish(self) -> None:
        """Sum the buckets that are left."""
        while self._done < len(self.ends):
            self.send_next()
