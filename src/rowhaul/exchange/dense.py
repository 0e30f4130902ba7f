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
        self._size = sum(one.numel() for one in self._parameters)
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
        buffer = torch.zeros(1 + count + self._size + num_replicated, dtype=dtype)
        if loss is not None:
            buffer[0] = loss.detach().cpu()
        place = 1 + count
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                buffer[1 + number] = 1
                buffer[place : place + parameter.numel()] = parameter.grad.detach().reshape(-1).cpu()
            place += parameter.numel()
        return SharedGradients(buffer, buffer[place:].numpy(), loss is not None)

    def spread(self, shared: SharedGradients) -> None:
        """Set every parameter's gradient to the sum over the workers."""
        place = 1 + len(self._parameters)
        for number, parameter in enumerate(self._parameters):
            if shared.buffer[1 + number] > 0:
                summed = shared.buffer[place : place + parameter.numel()].reshape(parameter.shape)
                parameter.grad = summed.to(parameter.device, copy=True)
            place += parameter.numel()
