"""Messages between the ranks of a process group: Gloo between CPUs, NCCL between GPUs, pipes within a host.

A Gloo message moves only when the receiver's "I am ready" has reached the sender, over the same connection
that carries the payloads of the other direction: a receive that is posted behind a large send comes late,
and the link is used one way at a time. All receives of a call therefore go first. Cutting large messages
into chunks gained nothing on a shaped link, and costs an operation each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rowhaul.transport.base import LinkError
from rowhaul.transport.pipes import Pipe


class Message(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return when it has arrived, or when its memory may be used again."""
        ...


class Pairs:
    """Messages of tensors between one rank and the others of its group; used by one thread.

    Args:
        group: the process group; nothing else may use it.
        pipes: to ranks of the same host, which are used instead of the group.
    """

    def __init__(self, group: dist.ProcessGroup, pipes: Mapping[int, Pipe] | None = None) -> None:
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.uses_gpu = dist.get_backend(group) == "nccl"
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if self.uses_gpu else torch.device("cpu")
        )
        self.names = dist.get_process_group_ranks(group)  # by which a user knows the members
        self.pipes: Mapping[int, Pipe] = pipes or {}
        self._group = group

    def start(
        self, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]
    ) -> tuple[list[Message], list[Message]]:
        """Start messages, receives first; empty ones are not sent, as both ends know."""
        if self.uses_gpu:
            return self._start_batch(receives, sends)
        received = [self._receive(peer, tensor) for peer, tensor in receives.items() if tensor.numel()]
        sent = []
        for peer, tensor in sends.items():
            if not tensor.numel():
                continue
            if peer in self.pipes:
                self.pipes[peer].send(tensor)
            else:
                sent.append(self._begin(self._group.send, "sending to", peer, tensor))
        return received, sent

    @contextlib.contextmanager
    def swap(self, peer: int, own: Tensor, buffer: Callable[[], Tensor]) -> Iterator[Tensor]:
        """Send a tensor and get one of the same size and type, to be read until the context is left.

        Args:
            peer: with whom.
            own: what is sent; may be changed as soon as the other one is there.
            buffer: makes memory for the other one, where some is needed.
        """
        if peer in self.pipes:
            self.pipes[peer].send(own)
            with self.pipes[peer].next_in_place(own.nbytes) as theirs:
                yield theirs.view(own.dtype)
            return
        theirs = buffer()
        received, sent = self.start({peer: theirs}, {peer: own})
        for message in received + sent:
            message.wait()
        yield theirs

    def close(self) -> None:
        """End the pipes; whoever waits at one gets an error."""
        for pipe in self.pipes.values():
            pipe.close()

    def _receive(self, peer: int, tensor: Tensor) -> Message:
        if peer in self.pipes:
            return self.pipes[peer].expect(tensor)
        return self._begin(self._group.recv, "receiving from", peer, tensor)

    def _begin(
        self, start: Callable[[list[Tensor], int, int], dist.Work], what: str, peer: int, tensor: Tensor
    ) -> Message:
        name = self.names[peer]
        try:
            return _GroupMessage(start([tensor], peer, 0), tensor, what, name)
        except RuntimeError as error:
            raise _link_error(error, what, tensor, name) from error

    def _start_batch(
        self, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]
    ) -> tuple[list[Message], list[Message]]:
        """NCCL wants all messages of a call at once, and answers for them together."""
        operations = [
            dist.P2POp(way, tensor, group=self._group, group_peer=peer)
            for way, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in tensors.items()
            if tensor.numel()
        ]
        if not operations:
            return [], []
        first = operations[0]
        messages: list[Message] = [
            _GroupMessage(work, first.tensor, "exchanging rows with", first.peer)
            for work in dist.batch_isend_irecv(operations)
        ]
        return messages, messages


@dataclass(frozen=True)
class _GroupMessage:
    """A message over the process group; holds on to its tensor."""

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
