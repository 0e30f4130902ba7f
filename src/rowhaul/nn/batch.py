"""The samples that one rank trains in one step, as tensors.

A batch knows the size of the *global* batch that it is a part of: a loss divided by it adds up over
ranks to the loss of one process, however unequal their shares, down to a rank with no sample at all.
It knows the global index of its samples too, so that whatever is random per sample does not depend
on who trains it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.errors import DataError
from rowhaul.nn.jagged import KeyedJaggedTensor

if TYPE_CHECKING:
    from rowhaul.data.samples import Samples


_ALIGNMENT = 64  # bytes, of tensors that are sent together


@dataclass(frozen=True)
class Totals:
    """Counts over the global batch, made by the reader: what a loss may be divided by instead of its size."""

    weight: float  # sum of the weights of all samples
    labelled: tuple[float, ...]  # samples that have each label
    weighted: tuple[float, ...]  # sum of the weights of the samples that have each label

    @classmethod
    def from_array(cls, counted: npt.NDArray[np.float64]) -> Totals:
        """Name what `Samples.global_totals` returns."""
        weight, *counts = counted.tolist()
        return cls(weight, tuple(counts[: len(counts) // 2]), tuple(counts[len(counts) // 2 :]))


@dataclass(frozen=True, eq=False)
class Batch:
    """Dense numbers, ids, labels and global positions of some samples, in one order."""

    dense: Tensor  # samples x dense columns, float32
    ids: KeyedJaggedTensor
    labels: Tensor | None  # samples, float32; of several labels samples x labels, NaN where one is missing
    index: Tensor  # samples, int64: position of each in the whole stream
    global_size: int  # samples of the global batch
    weights: Tensor | None = None  # samples, float32: how much each counts in the loss
    groups: Tensor | None = None  # samples, int64: whose each is, for metrics within a group
    totals: Totals | None = None  # of the global batch, where it has several labels or weights
    time: int = 0  # of the newest event of the global batch, in seconds since 1970; 0: not known
    losses: list[Tensor] = field(default_factory=list, repr=False)  # of samples, as last given to `loss`

    def __post_init__(self) -> None:
        samples = len(self)
        shapes = {"dense": self.dense.shape[:1], "ids": (self.ids.stride(),), "index": self.index.shape}
        if self.labels is not None:
            shapes["labels"] = self.labels.shape[:1]
        for name in ("weights", "groups"):
            if (column := getattr(self, name)) is not None:
                shapes[name] = column.shape
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
            None if samples.id_weights is None else _tensor(samples.id_weights),
            lengths=_tensor(samples.lengths.reshape(-1)),
            stride=len(samples),
        )
        totals = samples.global_totals()
        return cls(
            dense=_tensor(samples.dense),
            ids=ids,
            labels=None if samples.labels is None else _tensor(samples.labels),
            index=_tensor(samples.index),
            global_size=len(samples) if global_size is None else global_size,
            weights=None if samples.weights is None else _tensor(samples.weights),
            groups=None if samples.groups is None else _tensor(samples.groups),
            totals=None if totals is None else Totals.from_array(totals),
            time=samples.time,
        )

    def loss(
        self,
        per_sample: Tensor,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        denominator: float | None = None,
    ) -> Tensor:
        """This rank's part of the mean over the global batch; ``per_sample`` is one loss per sample.

        Args:
            per_sample: losses; those that ``mask`` leaves out may be anything, but made from numbers: give
                labels that are NaN one first (``nan_to_num``), or the gradient is NaN, too.
            mask: which samples count, as booleans; the others still count in the size of the batch.
            weight: what each loss is multiplied by.
            denominator: what the sum is divided by instead of ``global_size``: a number that is the same on
                all ranks, such as one of ``totals``.
        """
        for name, given in (("mask", mask), ("weight", weight)):
            if given is not None and given.shape != (len(self),):
                raise DataError(
                    f"{name} needs one value per sample, of shape ({len(self)},), got {given.shape}"
                )
        if per_sample.shape != (len(self),):
            raise DataError(
                f"loss needs one value per sample, of shape ({len(self)},), got {tuple(per_sample.shape)}; "
                'use reduction="none", and do not average: that is done here, over the global batch'
            )
        if weight is not None:
            per_sample = per_sample * weight.to(per_sample.dtype)
        if mask is not None:
            per_sample = torch.where(mask, per_sample, torch.zeros_like(per_sample))
        self.losses[:] = [per_sample.detach()]
        size = max(self.global_size, 1) if denominator is None else denominator
        # Where nothing counts there is nothing to divide by, and nothing to learn.
        return per_sample.sum() / (size if size > 0 else 1)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same samples on another device."""
        return replace(
            self,
            dense=self.dense.to(device, non_blocking=non_blocking),
            ids=self.ids.to(device, non_blocking),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=non_blocking),
            index=self.index.to(device, non_blocking=non_blocking),
            weights=None if self.weights is None else self.weights.to(device, non_blocking=non_blocking),
        )

    def beside(self, device: torch.device) -> Batch:
        """The same samples for a model on a device, sent without waiting; ids go by themselves, if at all."""
        if device.type == "cpu":
            return self
        names = [name for name in ("dense", "labels", "index", "weights") if getattr(self, name) is not None]
        moved = _sent([getattr(self, name) for name in names], device)
        there: dict[str, Any] = dict(zip(names, moved, strict=True))
        return replace(self, **there)

    def __len__(self) -> int:
        return len(self.index)


def _sent(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy to a card without waiting, all of them at once; a worker may have no samples."""
    if any(one.device.type != "cpu" or not one.numel() for one in tensors):
        return [one.to(device) for one in tensors]
    sizes = [one.nbytes + -one.nbytes % _ALIGNMENT for one in tensors]
    starts = [0, *accumulate(sizes)]
    together = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for one, start in zip(tensors, starts, strict=False):
        # In this thread: to wake others, as PyTorch does, takes longer.
        here = together.numpy()[start : start + one.nbytes]
        np.copyto(here.view(one.numpy().dtype).reshape(one.shape), one.numpy())
    there = together.to(device, non_blocking=True)
    return [
        there[start : start + one.nbytes].view(one.dtype).view(one.shape)
        for one, start in zip(tensors, starts, strict=False)
    ]


def pinned_copy(tensor: Tensor) -> Tensor:
    """Copy to host memory that a card reads without waiting."""
    # In this thread: to wake others, as PyTorch does, takes longer.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(copy.numpy(), tensor.numpy())
    return copy


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """Share memory where PyTorch can: it takes no read-only arrays, which Arrow hands out."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
