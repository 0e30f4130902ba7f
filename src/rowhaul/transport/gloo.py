"""The default transport: Gloo between hosts, pipes through shared memory within a host.

A Gloo message moves only when the receiver's "ready" has reached the sender, over the same connection that
carries the payloads of the other direction: a receive posted behind a large send is late, and the link is
used one way at a time. All receives of a call therefore go first. Cutting large messages into chunks gained
nothing on a shaped link, and costs an operation each.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rowhaul.errors import ClusterError
from rowhaul.transport.base import Bytes, Groups, LinkError, Membership, check_buffers, complete
from rowhaul.transport.collectives import PairwiseCollective, as_tensor
from rowhaul.transport.pipe_setup import form_pipes
from rowhaul.transport.pipes import Arrival, Pipe

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # read by Gloo whenever it makes a group
# Waiting for another rank is not an error, however long it computes; the heartbeat detects lost ranks.
_OPERATION = timedelta(days=7)


class GlooTransport:
    """Connects ranks over process groups of ``torch.distributed``, and ranks of one host over pipes.

    ``ROWHAUL_SHARED_MEMORY=0`` on all ranks disables the pipes.
    """

    def connect(self, membership: Membership) -> Groups:
        """Make one process group for each purpose; on failure destroy those already made."""
        topology, host = membership.topology, membership.host
        everyone, workers = list(range(topology.num_ranks)), list(range(topology.num_workers))
        trains = membership.rank in workers
        owns_default = not dist.is_initialized()
        made: list[ProcessGroup] = []
        connected: list[GlooLinks] = []

        def close() -> None:
            for links in reversed(connected):
                links.close()
            _destroy(made, owns_default)

        try:
            with bound_to(membership.interface):
                made.append(_first_group(membership, everyone, owns_default))
            with bound_to(membership.side_interface):
                dense = _new_group(workers)
                made += [dense] if trains else []
                made += [_new_group(everyone), _new_group(everyone)]
            for group in made:
                connected.append(connect_group(group, host, secret=membership.secret))
        except BaseException:
            close()
            raise
        moves, control, data = connected[0], connected[-2], connected[-1]
        summed = PairwiseCollective(connected[1]) if trains else None
        return Groups(moves, summed, PairwiseCollective(control), data, close)


class MessageTransfer:
    """The messages of one post."""

    __slots__ = ("received", "sent")

    def __init__(self, received: list[Arrival | _GroupMessage], sent: list[_GroupMessage]) -> None:
        self.received, self.sent = received, sent

    def wait_received(self) -> None:
        """Return when all receives are complete."""
        for message in self.received:
            message.wait()

    def wait_sent(self) -> None:
        """Return when the sent buffers may be reused."""
        for message in self.sent:
            message.wait()


class GlooLinks:
    """Messages between one rank and the others of its group; used by one thread.

    Args:
        group: the process group; nothing else may use it.
        pipes: to ranks of the same host, used instead of the group.

    Attributes:
        sent_bytes: what was sent to each rank of the run so far.
    """

    def __init__(self, group: ProcessGroup, pipes: Mapping[int, Pipe] | None = None) -> None:
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.names = dist.get_process_group_ranks(group)  # the members' ranks in the run, for messages
        self.pipes: Mapping[int, Pipe] = pipes or {}
        self.sent_bytes: Counter[int] = Counter()
        self._group = group

    @property
    def near(self) -> frozenset[int]:
        """The ranks of the same host that share memory."""
        return frozenset(self.pipes)

    def post(self, receives: Mapping[int, Bytes], sends: Mapping[int, Bytes]) -> MessageTransfer:
        """Start one message from and to each of the given ranks, receives first; does not wait."""
        check_buffers(self.rank, self.num_ranks, receives, sends)
        pipes = self.pipes
        received = [
            pipes[peer].expect_bytes(data) if peer in pipes else self._receive(peer, torch.from_numpy(data))
            for peer, data in receives.items()
            if data.size
        ]
        sent = []
        for peer, data in sends.items():
            if not data.size:
                continue
            if peer in pipes:
                pipes[peer].send_bytes(data)
            else:
                sent.append(self._begin(self._group.send, "sending to", peer, as_tensor(data)))
        return MessageTransfer(received, sent)

    def start(self, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> MessageTransfer:
        """Start messages of tensors, receives first; empty ones are not sent, as both ends know."""
        received = [self._receive(peer, tensor) for peer, tensor in receives.items() if tensor.numel()]
        sent = []
        for peer, tensor in sends.items():
            if not tensor.numel():
                continue
            self.sent_bytes[self.names[peer]] += tensor.nbytes
            if peer in self.pipes:
                self.pipes[peer].send(tensor)
            else:
                sent.append(self._begin(self._group.send, "sending to", peer, tensor))
        return MessageTransfer(received, sent)

    @contextlib.contextmanager
    def swap(self, peer: int, own: Tensor, buffer: Callable[[], Tensor]) -> Iterator[Tensor]:
        """Send a tensor and yield the peer's, of the same size and type; valid until the context ends.

        Args:
            peer: the rank to swap with.
            own: the tensor to send; may change once the other one is yielded.
            buffer: allocates memory for the other one, if needed.
        """
        if peer in self.pipes:
            self.sent_bytes[self.names[peer]] += own.nbytes
            self.pipes[peer].send(own)
            with self.pipes[peer].next_in_place(own.nbytes) as theirs:
                yield theirs.view(own.dtype)
            return
        theirs = buffer()
        complete(self.start({peer: theirs}, {peer: own}))
        yield theirs

    def free_memory(self) -> None:
        """Free the memory of messages already read; all ranks call this together."""
        for pipe in self.pipes.values():
            pipe.start_freeing()
        for pipe in self.pipes.values():
            pipe.finish_freeing()

    def close(self) -> None:
        """Close the pipes; pending waits at either end raise an error."""
        for pipe in self.pipes.values():
            pipe.close()

    def _receive(self, peer: int, tensor: Tensor) -> Arrival | _GroupMessage:
        if peer in self.pipes:
            return self.pipes[peer].expect(tensor)
        return self._begin(self._group.recv, "receiving from", peer, tensor)

    def _begin(
        self, start: Callable[[list[Tensor], int, int], dist.Work], what: str, peer: int, tensor: Tensor
    ) -> _GroupMessage:
        name = self.names[peer]
        try:
            return _GroupMessage(start([tensor], peer, 0), tensor, what, name)
        except RuntimeError as error:
            raise _link_error(error, what, tensor, name) from error


def connect_group(
    group: ProcessGroup,
    host: str | None = None,
    timeout: float | None = None,
    secret: bytes | None = None,
) -> GlooLinks:
    """Make links between the ranks of a group, over pipes within a host; all its ranks call this together.

    Args:
        group: the process group; nothing else may use it.
        host: a name that the ranks of one host share, to separate ranks that could share memory.
        timeout: seconds that a message within a host may take; between hosts the group's timeout holds.
        secret: of the run, which ranks of one host prove to each other.
    """
    links = GlooLinks(group)
    if links.num_ranks > 1:
        gather = PairwiseCollective(links).all_gather
        links.pipes = form_pipes(links.rank, gather, links.names, host, timeout, secret)
    return links


@contextlib.contextmanager
def bound_to(interface: str) -> Iterator[None]:
    """Make Gloo use an interface for groups made inside; restore the environment afterwards."""
    before = os.environ.get(INTERFACE_VARIABLE)
    os.environ[INTERFACE_VARIABLE] = interface
    try:
        yield
    finally:
        if before is None:
            del os.environ[INTERFACE_VARIABLE]
        else:
            os.environ[INTERFACE_VARIABLE] = before


@dataclass(frozen=True)
class _GroupMessage:
    """A message over the process group; keeps its tensor alive."""

    work: dist.Work
    tensor: Tensor
    what: str
    peer: int

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _link_error(error, self.what, self.tensor, self.peer) from error


def _link_error(error: RuntimeError, what: str, tensor: Tensor, peer: int) -> LinkError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return LinkError(f"{what} rank {peer} failed ({tensor.nbytes:,} bytes): {reason}", peer)


def _first_group(membership: Membership, everyone: list[int], owns_default: bool) -> ProcessGroup:
    """The default group, or a new one if the user has initialised ``torch.distributed``."""
    rank, size = membership.rank, len(everyone)
    if owns_default:
        dist.init_process_group(
            "gloo", store=membership.store, rank=rank, world_size=size, timeout=_OPERATION
        )
        world = dist.group.WORLD
        assert world is not None
        return world
    given = (dist.get_rank(), dist.get_world_size())
    if given != (rank, size):
        raise ClusterError(
            f"torch.distributed was initialised as rank {given[0]} of {given[1]}, "
            f"but the environment says rank {rank} of {size}"
        )
    return _new_group(everyone)


def _new_group(ranks: list[int]) -> ProcessGroup:
    """On ranks outside it, a placeholder that is not a group."""
    group: ProcessGroup = dist.new_group(ranks, timeout=_OPERATION, backend="gloo")
    return group


def _destroy(made: list[ProcessGroup], owns_default: bool) -> None:
    """Destroy our groups; those that the user made first stay."""
    if not owns_default:
        for group in reversed(made):
            dist.destroy_process_group(group)
    elif dist.is_initialized():
        dist.destroy_process_group()
