"""The samples that one rank trains in one step, as tensors.

A batch knows the size of the *global* batch that it is a part of: a loss divided by it adds up over
ranks to the loss of one process, however unequal their shares, down to a rank with no sample at all.
It knows the global index of its samples too, so that whatever is random per sample does not depend
on who trains it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.errors import DataError
from rowhaul.nn.jagged import KeyedJaggedTensor

if TYPE_CHECKING:
    from rowhaul.data.samples import Samples


@dataclass(frozen=True, eq=False)
class Batch:
    """Dense numbers, ids, labels and global positions of some samples, in one order."""

    dense: Tensor  # samples x dense columns, float32
    ids: KeyedJaggedTensor
    labels: Tensor | None  # samples, float32
    index: Tensor  # samples, int64: position of each in the whole stream
    global_size: int  # samples of the global batch
    time: int = 0  # of the newest event of the global batch, in seconds since 1970; 0: not known
    losses: list[Tensor] = field(default_factory=list, repr=False)  # of samples, as last given to `loss`

    def __post_init__(self) -> None:
        samples = len(self)
        shapes = {"dense": self.dense.shape[:1], "ids": (self.ids.stride(),), "index": self.index.shape}
        if self.labels is not None:
            shapes["labels"] = self.labels.shape
        wrong = {name: tuple(shape) for name, shape in shapes.items() if tuple(shape) != (samples,)}
        if wrong or self.dense.dim() != 2:
            raise DataError(
                f"a batch of {samples:,} samples needs dense numbers in two dimensions and everything "
                f"else once per sample; got dense of shape {tuple(self.dense.shape)}, wrong are {wrong}"
            )
        if self.global_size < samples:
            raise DataError(
                f"global_size is {self.global_size:,}, but the batch alone has {samples:,} samples; "
                "give the number of samples of all ranks together"
            )

    @classmethod
    def from_samples(cls, samples: Samples, global_size: int | None = None) -> Batch:
        """Wrap what a reader yields, sharing its memory; by itself it is the whole global batch."""
        ids = KeyedJaggedTensor(
            samples.features,
            _tensor(samples.values),
            lengths=_tensor(samples.lengths.reshape(-1)),
            stride=len(samples),
        )
        return cls(
            dense=_tensor(samples.dense),
            ids=ids,
            labels=None if samples.labels is None else _tensor(samples.labels),
            index=_tensor(samples.index),
            global_size=len(samples) if global_size is None else global_size,
            time=samples.time,
        )

    def loss(self, per_sample: Tensor) -> Tensor:
        """This rank's part of the mean over the global batch; ``per_sample`` is one loss per sample."""
        if per_sample.shape != (len(self),):
            raise DataError(
                f"loss needs one value per sample, of shape ({len(self)},), got {tuple(per_sample.shape)}; "
                'use reduction="none", and do not average: that is done here, over the global batch'
            )
        self.losses[:] = [per_sample.detach()]
        return per_sample.sum() / max(self.global_size, 1)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same samples on another device."""
        return replace(
            self,
            dense=self.dense.to(device, non_blocking=non_blocking),
            ids=self.ids.to(device, non_blocking),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=non_blocking),
            index=self.index.to(device, non_blocking=non_blocking),
        )

    def beside(self, device: torch.device) -> Batch:
        """The same samples for a model on a device, sent without waiting; ids go by themselves, if at all."""
        if device.type == "cpu":
            return self
        names = [name for name in ("dense", "labels", "index") if getattr(self, name) is not None]
        moved: dict[str, Any] = {name: _sent(getattr(self, name), device) for name in names}
        return replace(self, **moved)

    def __len__(self) -> int:
        return len(self.index)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a card without waiting; a worker may have no samples."""
    return tensor.pin_memory().to(device, non_blocking=True) if tensor.numel() else tensor.to(device)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """Share memory where PyTorch can: it takes no read-only arrays, which Arrow hands out."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
