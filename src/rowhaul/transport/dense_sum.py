"""Dense gradients over the workers: one buffer, one sum, in rank order.

Into the same buffer go the gradients of replicated rows and the loss. A parameter that no worker has a
gradient for keeps none, as in one process: a flag for each travels along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from rowhaul.errors import ConfigError


@dataclass
class SharedGradients:
    """What one iteration sums over the workers."""

    buffer: Tensor  # all of it
    replicated: npt.NDArray[Any]  # a view: the gradients of replicated rows
    has_loss: bool

    @property
    def loss(self) -> float | None:
        """The loss of the global batch, once summed."""
        return float(self.buffer[0]) if self.has_loss else None


class DenseGradients:
    """The dense parameters of a model, and their gradients in a row."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._sizes = [one.numel() for one in self._parameters]
        self._size = sum(self._sizes)
        self._kept = torch.empty(0)
        kinds = {one.dtype for one in self._parameters}
        if len(kinds) > 1:
            raise ConfigError(
                f"the dense parameters have types {sorted(map(str, kinds))}; distributed training sums their "
                "gradients as one: convert the model to one type"
            )

    def collect(self, loss: Tensor | None, num_replicated: int, row_dtype: torch.dtype) -> SharedGradients:
        """This worker's gradients, flags and loss, with room for those of replicated rows."""
        dtype = self._parameters[0].dtype if self._parameters else row_dtype
        if num_replicated and dtype != row_dtype:
            raise ConfigError(
                f"dense parameters are {dtype}, rows {row_dtype}; replicated rows need both to be the same"
            )
        count = len(self._parameters)
        buffer = self._room(1 + count + self._size + num_replicated, dtype)
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

    def _room(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory that is kept from call to call; what is in it is whatever was."""
        if self._kept.dtype != dtype or self._kept.numel() < size:
            self._kept = torch.empty(size, dtype=dtype)
        return self._kept[:size]

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter's part of the buffer, in the parameter's shape."""
        first = 1 + len(self._parameters)
        parts = buffer[first : first + self._size].split(self._sizes) if self._sizes else ()
        return [part.view(one.shape) for part, one in zip(parts, self._parameters, strict=True)]

    def spread(self, shared: SharedGradients) -> None:
        """Set every parameter's gradient to the sum over the workers, without a copy: until the next sum."""
        flags = shared.buffer[1 : 1 + len(self._parameters)].tolist()
        views = self._views(shared.buffer)
        for flag, parameter, view in zip(flags, self._parameters, views, strict=True):
            if flag > 0:
                parameter.grad = view.to(parameter.device)
