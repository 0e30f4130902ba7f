"""`DenseSum`: the dense gradients of a training loop over the embedding database."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.transport.base import Links, Transfer
from rowhaul.transport.dense.gradients import DenseGradients, SharedGradients
from rowhaul.transport.gloo import connect_group


class DenseSum:
    """Sums the gradients of dense parameters over all ranks, in rank order: the same bits on each of them.

    All ranks call `start` after backward() and `finish` before the optimizer's step. Every rank sends its
    gradients to every other, which suits small layers; wrap large ones in ``DistributedDataParallel``.

    Args:
        parameters: of one dtype, the same on all ranks.
        group: the ranks, of ``torch.distributed``; all unless given. A Gloo group of them is created.
        links: between the ranks, instead of a group.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: dist.ProcessGroup | None = None,
        links: Links | None = None,
    ) -> None:
        self._gradients = DenseGradients(parameters)
        if links is None:
            ranks = None if group is None else dist.get_process_group_ranks(group)
            made = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
            links = connect_group(made)
        self._links = links
        self._everyone = torch.empty(0)  # ranks x values
        self._started: tuple[SharedGradients, Transfer] | None = None

    def start(self) -> None:
        """Send this rank's gradients; a missing one counts as zeros."""
        shared, rank, num_ranks = self._gradients.begin(), self._links.rank, self._links.num_ranks
        self._gradients.complete(shared)
        if self._everyone.numel() != num_ranks * shared.own.numel():
            self._everyone = torch.empty((num_ranks, shared.own.numel()), dtype=shared.own.dtype)
        self._everyone[rank] = shared.own
        values = self._everyone.numpy().view(np.uint8)
        others = [other for other in range(num_ranks) if other != rank]
        transfer = self._links.post({one: values[one] for one in others}, dict.fromkeys(others, values[rank]))
        self._started = shared, transfer

    def finish(self) -> None:
        """Replace the gradients by their sums over all ranks."""
        if self._started is None:
            raise ConfigError("finish() needs a sum in progress; call start() first")
        (shared, transfer), self._started = self._started, None
        transfer.wait_received()
        shared.total.copy_(self._everyone[0])
        for values in self._everyone[1:]:
            shared.total += values
        transfer.wait_sent()
        self._gradients.spread(shared)
