"""The seam between the runtime and the network: messages between pairs, and collectives.

Both ends of every message know its size beforehand, from the plan: nothing but payloads travels.
`rowhaul.transport.collectives` has the real ones, over ``torch.distributed`` between hosts and through shared
memory within one; `rowhaul.transport.in_process` has the same between threads of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowhaul.errors import RowhaulError

Bytes = npt.NDArray[np.uint8]


class LinkError(RowhaulError):
    """A message could not be sent or received; ``peer`` is the rank at the other end, where known."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


def check_buffers(rank: int, num_ranks: int, *messages: Mapping[int, Bytes]) -> None:
    """Refuse peers that do not exist and buffers that are not plain bytes."""
    for buffers in messages:
        for peer, data in buffers.items():
            if not 0 <= peer < num_ranks or peer == rank:
                raise ValueError(f"rank {rank} has links to the other ranks of {num_ranks}; got rank {peer}")
            if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
                raise ValueError(
                    f"a message is a contiguous array of uint8; got {data.dtype} of shape {data.shape} "
                    f"for rank {peer}"
                )


class Transfer(Protocol):
    """Messages under way; the buffers must stay as they are until they have been waited for."""

    def wait_received(self) -> None:
        """Return when everything to be received is there."""
        ...

    def wait_sent(self) -> None:
        """Return when the sent buffers may be used again."""
        ...


class Links(Protocol):
    """Point-to-point messages; used by one thread, which posts the same sequence as its peers."""

    rank: int
    num_ranks: int

    def post(self, receives: Mapping[int, Bytes], sends: Mapping[int, Bytes]) -> Transfer:
        """Start one message from and to each of the given ranks, receives first; does not wait."""
        ...


class Collective(Protocol):
    """What all members of a group do together; used by one thread."""

    rank: int  # within the group
    num_ranks: int

    def all_gather(self, mine: Bytes) -> npt.NDArray[np.uint8]:
        """Everyone's bytes, ranks x length; the length is the same on all ranks."""
        ...

    def sum_in_rank_order(self, values: Tensor) -> None:
        """Replace a one-dimensional tensor by the sum over ranks, added up from rank 0 on: the same bits."""
        ...


class KeyValueStore(Protocol):
    """The rendezvous store, as ``torch.distributed`` has it."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key; waits for it."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        ...

    def wait(self, keys: list[str], timeout: Any) -> None:
        """Wait for keys."""
        ...
