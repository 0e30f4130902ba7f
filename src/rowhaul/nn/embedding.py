"""`EmbeddingBagCollection`: many tables over raw keys, pooled in one pass, trained in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.nn.collection import TableCollection, check_tables, chosen_settings, output_names
from rowhaul.nn.config import EmbeddingBagConfig
from rowhaul.nn.features import group_features
from rowhaul.nn.jagged import KeyedJaggedTensor, KeyedTensor
from rowhaul.nn.pooled import PoolRows
from rowhaul.nn.row_source import RowSettings
from rowhaul.nn.uncompiled import uncompiled
from rowhaul.optim import RowOptimizerRule


class EmbeddingBagCollection(TableCollection):
    """Pools the rows of every feature into one vector per sample, as TorchRec's module of this name.

    Keys are any int64. While ``training``, a key seen for the first time gets a row made from
    (seed, table, key); in ``eval()`` mode nothing is inserted, rows take no gradient, and unknown
    keys read as ``on_unknown`` says: ``"init"`` (the values the row would start with), ``"default"``
    (zeros), ``"error"``, or ``"tail"`` (what ids without a row of their own read: shared rows within a
    memory budget, zeros where rows are pruned, otherwise as ``"init"``).

    Args:
        tables: one configuration a table; all of one data type.
        is_weighted: whether features carry a weight per id.
        device: where pooled vectors go, and whole rows: on a card they are found, pooled and stepped there.
        optimizer: the row optimizer; its state lives in the row's record.
        seed: with table name and key it determines every initial value.
        on_unknown: see above.
        pruning: keep only the useful parts of rows in memory (`rowhaul.pruning.PruneSettings`).
        device_memory: bytes of a card that rows may take, such as ``"8GiB"``: those used last are there, all
            others in host memory, from where they are fetched; by default all rows are on the card.
        row_settings: how rows are held, when not simply whole and in the tables' data type: in fewer bits
            (`rowhaul.nn.RowPrecision`), or pruned.

    Example:
        >>> tables = [EmbeddingBagConfig(embedding_dim=4, name="t", feature_names=["user", "item"])]
        >>> ebc = EmbeddingBagCollection(tables, optimizer=rowhaul.optim.Adagrad(lr=0.1))
        >>> ids = KeyedJaggedTensor.from_lengths_sync(
        ...     ["user", "item"], torch.tensor([7, -3, 10**15]), lengths=torch.tensor([1, 0, 1, 1]))
        >>> ebc(ids)["item"].shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer: RowOptimizerRule | None = None,
        seed: int = 0,
        on_unknown: str = "init",
        pruning: RowSettings | None = None,
        row_settings: RowSettings | None = None,
        device_memory: int | str = 0,
    ) -> None:
        check_tables(type(self).__name__, tables, EmbeddingBagConfig)
        settings = chosen_settings(pruning, row_settings)
        groups = group_features(tables)
        super().__init__(tables, groups, device, optimizer, seed, on_unknown, settings, device_memory)
        self._bag_configs, self._is_weighted = list(tables), is_weighted
        self._keys = output_names(tables)
        self._is_frozen = [config.frozen for config in tables for _ in config.feature_names]
        self._dims = [config.embedding_dim for config in tables for _ in config.feature_names]
        ends = list(accumulate(self._dims, initial=0))
        columns = zip(pairwise(ends), self._is_frozen, strict=True)
        self._frozen_columns = [slice(*bounds) for bounds, frozen in columns if frozen]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._bag_configs

    def is_weighted(self) -> bool:
        """Whether features carry a weight per id."""
        return self._is_weighted

    @uncompiled
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors of every feature, samples × Σ dim, in the order of tables and their features."""
        features = self._ids(features)
        weights = features.weights_or_none()
        if self._is_weighted != (weights is not None):
            given, needed = ("no ", "is_weighted=True") if self._is_weighted else ("", "is_weighted=False")
            raise ConfigError(f"the features carry {given}weights, but the collection has {needed}")
        if weights is not None and (weights.dim() != 1 or not weights.is_floating_point()):
            form = f"{weights.dtype} of shape {tuple(weights.shape)}"
            raise ConfigError(f"weights must be one floating-point number an id, got {form}")
        shape = (features.stride(), sum(self._dims))
        reads = self._reader.read(features, training=self.training, on_unknown=self.on_unknown)
        trains = self.training and not all(self._is_frozen)
        anchor = self.anchor if trains else self.anchor.detach()
        dtype = self._groups[0].dtype
        pooled: Tensor = PoolRows.apply(anchor, weights, shape, dtype, reads, self._frozen_columns)  # type: ignore[no-untyped-call]  # torch's apply has no types
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=pooled.to(self.device))
