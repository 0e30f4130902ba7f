"""The links between some members of a group, numbered from 0 in the order given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from rowhaul.transport.base import Bytes, Transfer

if TYPE_CHECKING:
    from rowhaul.transport.gloo import GlooLinks
    from rowhaul.transport.pipes import Pipe

Data = TypeVar("Data")


class SomeLinks:
    """Links of one member to some others of its group; their messages take turns with the group's own.

    Args:
        links: of the whole group.
        members: ranks in the group, this one among them.
    """

    def __init__(self, links: GlooLinks | SomeLinks, members: Sequence[int]) -> None:
        if links.rank not in members:
            raise ValueError(f"rank {links.rank} is not among the members {list(members)}")
        self.rank: int = members.index(links.rank)
        self.num_ranks = len(members)
        self.pipes: Mapping[int, Pipe] = {
            place: links.pipes[member] for place, member in enumerate(members) if member in links.pipes
        }
        self._links, self._members = links, members

    @property
    def near(self) -> frozenset[int]:
        """The members that messages reach through memory."""
        return frozenset(self.pipes)

    @property
    def sent_bytes(self) -> Mapping[int, int]:
        """What was sent to each rank of the run so far, by the whole group."""
        return self._links.sent_bytes

    def post(self, receives: Mapping[int, Bytes], sends: Mapping[int, Bytes]) -> Transfer:
        """Start one message from and to each of the given members, receives first; does not wait."""
        return self._links.post(self._renumbered(receives), self._renumbered(sends))

    def start(self, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> Transfer:
        """Start messages of tensors, receives first; empty ones are not sent, as both ends know."""
        return self._links.start(self._renumbered(receives), self._renumbered(sends))

    def swap(
        self, peer: int, own: Tensor, buffer: Callable[[], Tensor]
    ) -> contextlib.AbstractContextManager[Tensor]:
        """Send a tensor and yield the peer's, as `GlooLinks.swap`."""
        return self._links.swap(self._members[peer], own, buffer)

    def free_memory(self) -> None:
        """Free the memory of messages already read; the members call this together."""
        for pipe in self.pipes.values():
            pipe.start_freeing()
        for pipe in self.pipes.values():
            pipe.finish_freeing()

    def _renumbered(self, messages: Mapping[int, Data]) -> dict[int, Data]:
        return {self._members[place]: data for place, data in messages.items()}
