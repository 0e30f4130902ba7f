"""The gradients of a model's other parameters, summed over ranks beside a database's rows.

Like headers, gradients of other ranks are awaited before they can come (see `ring`): a rank that is late
may otherwise lose more time to Gloo's busy thread than the sum takes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.transport.base import Links, Transfer
from rowhaul.transport.gloo import connect_group


class DenseGradients:
    """Sums the gradients of parameters over all ranks, in rank order: the same bits on each of them.

    All ranks call `start` and `finish` in turns, once a step. Every rank sends its gradients to every other,
    which suits small layers; wrap large ones in ``DistributedDataParallel``.

    Args:
        parameters: dense ones, of one type, the same on all ranks.
        group: the ranks, of ``torch.distributed``; all, unless given. A Gloo group of them is made.
        links: between the ranks, instead of a group.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: dist.ProcessGroup | None = None,
        links: Links | None = None,
    ) -> None:
        self._parameters = list(parameters)
        types = {parameter.dtype for parameter in self._parameters}
        if len(types) != 1:
            raise ConfigError(f"parameters of one type are needed, got {len(types)} types: {types}")
        if links is None:
            ranks = None if group is None else dist.get_process_group_ranks(group)
            made = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
            links = connect_group(made)
        self._links = links
        length = sum(parameter.numel() for parameter in self._parameters)
        self._everyone = torch.zeros((links.num_ranks, length), dtype=types.pop())
        self._sent: list[Transfer] = []
        self._received = self._await()

    def start(self) -> None:
        """Send this rank's gradients, which backward() has made; a missing one counts as zeros."""
        own = self._everyone[self._links.rank]
        for part, parameter in zip(self._split(own), self._parameters, strict=True):
            part.zero_() if parameter.grad is None else part.copy_(parameter.grad.reshape(-1))
        message = own.numpy().view(np.uint8)
        self._sent = [self._links.post({}, {rank: message}) for rank in self._others()]

    def finish(self) -> None:
        """Replace the gradients by the sums over all ranks."""
        for transfer in self._received:
            transfer.wait_received()
        total = self._everyone[0].clone()
        for others in self._everyone[1:]:
            total += others
        for transfer in self._sent:
            transfer.wait_sent()
        self._received = self._await()
        for part, parameter in zip(self._split(total), self._parameters, strict=True):
            parameter.grad = part.view_as(parameter)

    def _await(self) -> list[Transfer]:
        return [
            self._links.post({rank: self._everyone[rank].numpy().view(np.uint8)}, {})
            for rank in self._others()
        ]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._links.num_ranks) if rank != self._links.rank]

    def _split(self, values: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = values.split([parameter.numel() for parameter in self._parameters])
        return parts
