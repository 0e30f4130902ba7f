"""Which ids of a batch belong to which table and vector, on a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.nn.batch import pinned_copy
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor


@dataclass(frozen=True)
class Bags:
    """Which ids make which vectors: the bags of the first feature, sample by sample, then the next."""

    num_samples: int
    num_ids: int
    offsets: Tensor | None  # bags + 1; None: each bag has one id
    bags: Tensor | None  # ids: the bag of each
    columns: Tensor  # features: where their vectors begin
    is_mean: Tensor  # features
    weights: Tensor | None = None  # ids

    @property
    def num_bags(self) -> int:
        """Features times samples."""
        return len(self.columns) * self.num_samples

    @property
    def one_each(self) -> bool:
        """Whether each bag has one id."""
        return self.offsets is None


@dataclass(frozen=True)
class Ids:
    """The ids of a batch that read tables of one row size."""

    keys: Tensor
    tables: Tensor  # position of each one's table
    entries: slice | Tensor  # which ids of the batch they are
    bags: Bags


class FeatureBags:
    """Features over tables of one row size; numbers that every batch shares are on the card.

    Args:
        groups: of features; their tables are numbered one group after the other.
        device: the card.
    """

    def __init__(self, groups: Sequence[FeatureGroup], device: torch.device) -> None:
        self.device, self.dim, self.dtype = device, groups[0].dim, groups[0].dtype
        self.features = [name for group in groups for name in group.features]
        first = np.cumsum([0, *(len(group.specs) for group in groups)])
        tables = [group.feature_tables + start for group, start in zip(groups, first[:-1], strict=True)]
        self._tables = self._there(np.concatenate(tables).astype(np.int32))
        self._columns = self._there(np.concatenate([group.columns for group in groups]))
        self._is_mean = self._there(np.concatenate([group.is_mean for group in groups]).astype(np.int32))
        self._tables_of: tuple[int, Tensor] = 0, self._tables[:0]  # of bags of one id, for so many samples

    def of(self, features: KeyedJaggedTensor) -> Ids:
        """Select a batch's ids."""
        known = features.keys()
        absent = [name for name in self.features if name not in known]
        if absent:
            raise ConfigError(f"feature {absent[0]!r} is missing; the batch has {', '.join(known)}")
        positions = [known.index(name) for name in self.features]
        num_samples, lengths = features.stride(), features.lengths()
        values = features.values()
        entries: slice | Tensor = slice(0, len(values))
        if positions != list(range(len(known))):
            starts = features.offset_per_key()
            parts = [torch.arange(starts[one], starts[one + 1]) for one in positions]
            chosen = torch.cat(parts)
            values, entries = values[chosen.to(values.device)], chosen.to(self.device)
            lengths = lengths.view(len(known), num_samples)[positions].reshape(-1)
        keys = self._moved(values.detach().to(torch.int64))
        if len(values) == len(lengths) and _all_ones(lengths):
            bags = Bags(num_samples, len(keys), None, None, self._columns, self._is_mean)
            return Ids(keys, self._tables_of_bags(num_samples), entries, bags)
        sizes = self._moved(lengths.to(torch.int64))
        offsets = torch.cat([sizes.new_zeros(1), torch.cumsum(sizes, 0)])
        bag_of_id = torch.repeat_interleave(
            torch.arange(len(sizes), dtype=torch.int32, device=self.device), sizes, output_size=len(keys)
        )
        tables = self._tables[(bag_of_id // max(num_samples, 1)).to(torch.int64)]
        bags = Bags(num_samples, len(keys), offsets, bag_of_id, self._columns, self._is_mean)
        return Ids(keys, tables, entries, bags)

    def _tables_of_bags(self, num_samples: int) -> Tensor:
        known = self._tables_of  # once: another thread may replace it
        if known[0] != num_samples:
            known = self._tables_of = num_samples, self._tables.repeat_interleave(num_samples)
        return known[1]

    def _there(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _moved(self, tensor: Tensor) -> Tensor:
        """Copy to the card; from host memory without waiting."""
        tensor = tensor.contiguous()
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            tensor = pinned_copy(tensor)
        return tensor.to(self.device, non_blocking=True)


def _all_ones(lengths: Tensor) -> bool:
    """Whether each length is 1."""
    # In this thread: to wake others, as PyTorch does, takes longer.
    return bool(np.all(lengths.numpy() == 1) if lengths.device.type == "cpu" else (lengths == 1).all())
