"""The seam between the runtime and the network: messages between pairs of ranks, and collectives.

Both ends of every message know its size beforehand, from the plan: only payloads travel. A `Transport`
makes the links and collectives of a run; pass one to `rowhaul.cluster.join` to use another than Gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul._activity import Activity, doing
from rowhaul.errors import RowhaulError
from rowhaul.schedule.topology import Topology

Bytes = npt.NDArray[np.uint8]


class LinkError(RowhaulError):
    """A message could not be sent or received; ``peer`` is the rank at the other end, where known."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Transfer(Protocol):
    """Messages in flight; their buffers must not change before the wait for them returns."""

    def wait_received(self) -> None:
        """Return when all receives are complete."""

    def wait_sent(self) -> None:
        """Return when the sent buffers may be reused."""


class Links(Protocol):
    """Point-to-point messages; used by one thread, which posts the same sequence as its peers."""

    rank: int
    num_ranks: int

    @property
    def near(self) -> frozenset[int]:
        """The ranks that messages reach through memory."""

    def post(self, receives: Mapping[int, Bytes], sends: Mapping[int, Bytes]) -> Transfer:
        """Start one message from and to each of the given ranks, receives first; does not wait.

        Empty messages are not sent.
        """


@dataclass(frozen=True)
class Wire:
    """A sum whose first values are rounded when they travel: not exact."""

    dtype: torch.dtype
    count: int


class RunningSum(Protocol):
    """A sum in rank order whose values are sent bucket by bucket; all ranks of it make the same calls."""

    @property
    def ends(self) -> Sequence[int]:
        """Where each bucket ends."""

    def send_next(self) -> None:
        """Send the next bucket, whose values must not change any more."""

    def finish(self) -> None:
        """Send the buckets that are left; return when the sum is complete."""


class Collective(Protocol):
    """Operations of all members of a group; used by one thread."""

    rank: int  # within the group
    num_ranks: int

    def all_gather(self, mine: Bytes) -> npt.NDArray[np.uint8]:
        """Return the bytes of all ranks, ranks x length; the length is the same on all ranks."""

    def sum_in_rank_order(self, values: Tensor) -> None:
        """Replace a one-dimensional tensor by its sum over ranks, added in rank order: the same bits."""

    def bucket_ends(self, num_values: int, dtype: torch.dtype, wire: Wire | None = None) -> Sequence[int]:
        """Return where the buckets of a sum will end; any thread may call it while no sum is made."""

    def start_sum(self, own: Tensor, total: Tensor, wire: Wire | None = None) -> RunningSum:
        """Start to sum a tensor in rank order into another one."""

    def choose_again(self, speeds: Sequence[float] | None = None) -> None:
        """Choose anew how to sum: the result is the same; all members call this between the same two sums.

        ``speeds`` are bytes per second of the members' links; None: they are measured now.
        """

    def broadcast(self, values: Bytes) -> None:
        """Replace the bytes of all ranks by those of rank 0, in place; as many on each."""

    def among(self, members: Sequence[int]) -> Collective:
        """Return the collective of some members, numbered from 0; only they call it."""


@dataclass(frozen=True)
class Membership:
    """One rank's place in a run: what a transport needs to connect it to the others."""

    rank: int
    topology: Topology
    host: str  # equal on ranks of one host, which may share memory
    interface: str  # network interface of ``moves``
    side_interface: str  # network interface of the other groups
    store: Any  # rendezvous store of `torch.distributed`, below a prefix of this run
    secret: bytes | None = field(default=None, repr=False)  # that every connecting process must prove


@dataclass(frozen=True)
class Groups:
    """The connections of one rank."""

    moves: Links  # between all ranks: rows
    dense: Collective | None  # of all workers: dense gradients; None on a store
    control: Collective  # of all ranks: agreement on plans
    data: Links  # between all ranks: samples that only rank 0 can read
    close: Callable[[], None] = lambda: None


class Transport(Protocol):
    """A way to connect the ranks of a run."""

    def connect(self, membership: Membership) -> Groups:
        """Connect this rank to all others, which call this too. May block: the caller sets the time limit."""


def complete(transfer: Transfer) -> None:
    """Wait for all messages of a transfer."""
    with doing(Activity.AWAITING_ROWS):
        transfer.wait_received()
        transfer.wait_sent()


def swap(links: Links, sizes: Mapping[int, int], sends: Mapping[int, Bytes]) -> dict[int, Bytes]:
    """Send messages by rank, return those received, of the given sizes; one to this rank does not travel."""
    others = {peer: np.empty(size, np.uint8) for peer, size in sizes.items() if peer != links.rank}
    transfer = links.post(others, {peer: data for peer, data in sends.items() if peer != links.rank})
    complete(transfer)
    return {peer: others[peer] if peer != links.rank else sends[peer] for peer in sizes}


def gather_texts(collective: Collective, text: bytes) -> list[bytes]:
    """Gather a text of every rank, of any length, on all ranks."""
    every = collective.all_gather(np.array([len(text)], np.int64).view(np.uint8))
    lengths = np.ascontiguousarray(every).view(np.int64)[:, 0].tolist()
    if not any(lengths):
        return [b""] * len(lengths)
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    rows = collective.all_gather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def check_buffers(rank: int, num_ranks: int, *messages: Mapping[int, Bytes]) -> None:
    """Refuse unknown peers and buffers that are not plain bytes."""
    for buffers in messages:
        for peer, data in buffers.items():
            if not 0 <= peer < num_ranks or peer == rank:
                raise ValueError(f"rank {rank} has links to the other ranks of {num_ranks}; got rank {peer}")
            if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
                raise ValueError(
                    f"a message is a contiguous array of uint8; got {data.dtype} of shape {data.shape} "
                    f"for rank {peer}"
                )


def check_summable(values: Tensor) -> None:
    """Refuse a tensor that is not one-dimensional."""
    if values.ndim != 1:
        raise ValueError(f"a sum over ranks takes a one-dimensional tensor; got shape {tuple(values.shape)}")
