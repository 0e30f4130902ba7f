"""Dense gradients over the workers: one buffer, one sum, in rank order.

The same buffer holds the gradients of replicated rows and the loss; a worker that has found a gradient that
is not finite makes the loss NaN, so that all workers learn of it with the sum. A parameter without a gradient
on any worker keeps none, as in one process: the buffer has a flag for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.transport.base import Links, Transfer
from rowhaul.transport.gloo import connect_group


@dataclass
class SharedGradients:
    """What one iteration sums over the workers."""

    buffer: Tensor  # all of it
    replicated: npt.NDArray[Any]  # a view: the gradients of replicated rows
    has_loss: bool

    def flag(self) -> None:
        """Tell all workers, with the sum, that a gradient of this one is not finite."""
        self.buffer[0] = torch.nan

    @property
    def loss(self) -> float | None:
        """The loss of the global batch, once summed."""
        return float(self.buffer[0]) if self.has_loss else None


class DenseGradients:
    """Packs the gradients of dense parameters into one buffer, and unpacks their sums."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [one for one in parameters if one.requires_grad]
        self._sizes = [one.numel() for one in self._parameters]
        self._size = sum(self._sizes)
        self._kept = torch.empty(0)
        dtypes = {one.dtype for one in self._parameters}
        if len(dtypes) > 1:
            raise ConfigError(
                f"the dense parameters have types {sorted(map(str, dtypes))}, but their gradients are summed "
                "in one buffer: convert the model to one type"
            )

    def collect(
        self, loss: Tensor | None = None, num_replicated: int = 0, row_dtype: torch.dtype = torch.float32
    ) -> SharedGradients:
        """Pack this worker's gradients, flags and loss, with room for the gradients of replicated rows."""
        dtype = self._parameters[0].dtype if self._parameters else row_dtype
        if num_replicated and dtype != row_dtype:
            raise ConfigError(
                f"dense parameters are {dtype}, rows {row_dtype}; replicated rows need both to be the same"
            )
        count = len(self._parameters)
        buffer = self._allocate(1 + count + self._size + num_replicated, dtype)
        head = buffer[: 1 + count].zero_()
        if loss is not None:
            head[0] = loss.detach().cpu()
        views = self._views(buffer)
        given = [number for number, one in enumerate(self._parameters) if one.grad is not None]
        if len(given) == count:
            head[1:] = 1
        else:
            head[[1 + number for number in given]] = 1
            for number in set(range(count)).difference(given):
                views[number].zero_()
        if given:
            gradients = [one.grad for one in self._parameters if one.grad is not None]
            torch._foreach_copy_([views[number] for number in given], gradients)
        return SharedGradients(buffer, buffer[1 + count + self._size :].numpy(), loss is not None)

    def spread(self, shared: SharedGradients) -> None:
        """Set every parameter's gradient to its sum, without a copy: valid until the next `collect`."""
        flags = shared.buffer[1 : 1 + len(self._parameters)].tolist()
        views = self._views(shared.buffer)
        for flag, parameter, view in zip(flags, self._parameters, views, strict=True):
            if flag > 0:
                parameter.grad = view.to(parameter.device)

    def _allocate(self, size: int, dtype: torch.dtype) -> Tensor:
        """Undefined memory, kept from call to call."""
        if self._kept.dtype != dtype or self._kept.numel() < size:
            self._kept = torch.empty(size, dtype=dtype)
        return self._kept[:size]

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's part of the buffer, in the parameter's shape."""
        first = 1 + len(self._parameters)
        parts = buffer[first : first + self._size].split(self._sizes) if self._sizes else ()
        return [part.view(one.shape) for part, one in zip(parts, self._parameters, strict=True)]


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
        shared, rank, num_ranks = self._gradients.collect(), self._links.rank, self._links.num_ranks
        if self._everyone.numel() != num_ranks * shared.buffer.numel():
            self._everyone = torch.empty((num_ranks, shared.buffer.numel()), dtype=shared.buffer.dtype)
        self._everyone[rank] = shared.buffer
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
        shared.buffer.copy_(self._everyone[0])
        for values in self._everyone[1:]:
            shared.buffer += values
        transfer.wait_sent()
        self._gradients.spread(shared)
