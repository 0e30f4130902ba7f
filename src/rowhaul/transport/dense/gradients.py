"""Dense gradients over the workers: one buffer, one sum, in rank order.

The buffer begins with the gradients of the last parameter, which backward() computes first. Behind the
parameters it has the loss, a flag for each parameter, and the gradients of replicated rows. A worker that has
found a gradient that is not finite makes the loss NaN, so that all workers learn of it with the sum. A
parameter without a gradient on any worker keeps none, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.errors import ConfigError

_LOSS, _CHANGED, _FLAGS = 0, 1, 2  # places behind the parameters


@dataclass
class SharedGradients:
    """What one iteration sums over the workers."""

    own: Tensor  # of this worker: dense gradients, loss, flags, gradients of replicated rows
    total: Tensor  # the sum, once made
    num_dense: int  # values of dense gradients
    num_head: int  # loss and flags
    packed: list[tuple[Tensor, int] | None] = field(default_factory=list)  # gradients, and their versions
    num_packed: int = 0  # parameters
    has_loss: bool = False

    @property
    def replicated(self) -> npt.NDArray[Any]:
        """This worker's gradients of replicated rows, to be written."""
        return self.own[self.num_dense + self.num_head :].numpy()

    @property
    def summed_replicated(self) -> npt.NDArray[Any]:
        """The sums of the gradients of replicated rows."""
        return self.total[self.num_dense + self.num_head :].numpy()

    @property
    def loss(self) -> float | None:
        """The loss of the global batch, once summed."""
        return float(self.total[self.num_dense + _LOSS]) if self.has_loss else None

    @property
    def any_changed(self) -> bool:
        """Whether gradients have changed, on any worker, after they were sent."""
        return bool(self.total[self.num_dense + _CHANGED] > 0)

    def flag(self) -> None:
        """Tell all workers that a gradient of this one is not finite."""
        self.own[self.num_dense + _LOSS] = torch.nan

    def flag_changed(self) -> None:
        """Tell all workers that gradients of this one have changed since they were sent."""
        self.own[self.num_dense + _CHANGED] = 1


class DenseGradients:
    """Packs the gradients of dense parameters into one buffer, and unpacks their sums."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = [one for one in parameters if one.requires_grad][::-1]
        self.ends = list(accumulate(one.numel() for one in self.parameters))  # in the buffer
        self._size = self.ends[-1] if self.ends else 0
        self._kept = [torch.empty(0)] * 3
        self._turn = 0
        self._views_of_totals: dict[int, list[Tensor]] = {}  # by address
        dtypes = {one.dtype for one in self.parameters}
        if len(dtypes) > 1:
            raise ConfigError(
                f"the dense parameters have types {sorted(map(str, dtypes))}, but their gradients are summed "
                "in one buffer: convert the model to one type"
            )
        if torch.bfloat16 in dtypes:
            raise ConfigError(
                "the dense parameters are bfloat16, whose sums over workers would not be exact: keep them in "
                "float32, and compute in bfloat16 under torch.autocast"
            )

    def begin(self, num_replicated: int = 0, row_dtype: torch.dtype = torch.float32) -> SharedGradients:
        """Return memory for an iteration, with room for the gradients of replicated rows."""
        dtype = self.parameters[0].dtype if self.parameters else row_dtype
        if num_replicated and dtype != row_dtype:
            raise ConfigError(
                f"dense parameters are {dtype}, rows {row_dtype}; replicated rows need both to be the same"
            )
        num_head = _FLAGS + len(self.parameters)
        size = self._size + num_head + num_replicated
        self._turn = 3 - self._turn if self._turn else 1  # the parameters' .grad are views of the other total
        own, total = (self._allocate(place, size, dtype) for place in (0, self._turn))
        return SharedGradients(own, total, self._size, num_head)

    def pack(self, shared: SharedGradients, count: int) -> None:
        """Pack the gradients of the first ``count`` parameters of the buffer that are not packed yet."""
        first, shared.num_packed = shared.num_packed, count
        some = self.parameters[first:count]
        begin, end = (self.ends[one - 1] if one else 0 for one in (first, count))
        own, gradients = shared.own[begin:end], [one.grad for one in some]
        here = [one.reshape(-1) for one in gradients if one is not None and one.device == own.device]
        if some and len(here) == len(some):
            torch.cat(here, out=own)  # a third of the time of copies one by one
        else:
            self._copy(gradients, self._views(own, some))
        shared.packed += [None if one is None else (one, one._version) for one in gradients]

    @staticmethod
    def _copy(gradients: Sequence[Tensor | None], views: Sequence[Tensor]) -> None:
        """Copy gradients that may be absent, or on a card."""
        given = [(view, one) for view, one in zip(views, gradients, strict=True) if one is not None]
        if given:
            torch._foreach_copy_([view for view, _ in given], [one for _, one in given])
        for view, one in zip(views, gradients, strict=True):
            if one is None:
                view.zero_()

    def has_changed(self, shared: SharedGradients) -> bool:
        """Whether a gradient is not what was packed: backward() ran again, or the user has changed it."""
        packed = zip(self.parameters, shared.packed, strict=False)
        return any(
            parameter.grad is not (None if was is None else was[0])
            or (was is not None and was[0]._version != was[1])
            for parameter, was in packed
        )

    def complete(self, shared: SharedGradients, loss: Tensor | None = None) -> None:
        """Pack what is not packed yet, the loss and the flags."""
        self.pack(shared, len(self.parameters))
        head = shared.own[self._size : self._size + shared.num_head].zero_()
        if loss is not None:
            head[_LOSS] = loss.detach().cpu()
        shared.has_loss = loss is not None
        if all(one is not None for one in shared.packed):
            head[_FLAGS:] = 1
        else:
            head[[_FLAGS + number for number, one in enumerate(shared.packed) if one is not None]] = 1

    def pack_again(self, shared: SharedGradients) -> None:
        """Pack all gradients anew."""
        shared.packed, shared.num_packed = [], 0
        self.pack(shared, len(self.parameters))
        shared.own[self._size + _CHANGED] = 0

    def spread(self, shared: SharedGradients) -> None:
        """Set every parameter's gradient to its sum, without a copy: valid until the sum after the next."""
        flags = shared.total[self._size + _FLAGS : self._size + shared.num_head].tolist()
        address = shared.total.data_ptr()
        views = self._views_of_totals.get(address)
        if views is None:
            views = self._views_of_totals[address] = self._views(shared.total[: self._size], self.parameters)
        for flag, parameter, view in zip(flags, self.parameters, views, strict=True):
            if flag > 0:
                # A tensor of its own: what users do to it must not reach the next iteration's.
                parameter.grad = view.detach().to(parameter.device)

    @staticmethod
    def _views(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Each parameter's part of a buffer, in the parameter's shape."""
        parts = buffer.split([one.numel() for one in parameters]) if parameters else ()
        return [part.view(one.shape) for part, one in zip(parts, parameters, strict=True)]

    def _allocate(self, place: int, size: int, dtype: torch.dtype) -> Tensor:
        """Undefined memory, kept from call to call."""
        if self._kept[place].dtype != dtype or self._kept[place].numel() < size:
            self._kept[place] = torch.empty(size, dtype=dtype)
            self._views_of_totals.clear()
        return self._kept[place][:size]
