"""`EmbeddingBagCollection`: many tables over raw keys, pooled in one pass, trained in place.

Rows are not parameters: the collection reads them from a `RowSource`, the backward pass leaves one summed
gradient per distinct row there, and `RowOptimizer` steps the records themselves. Nothing the size of a
table is ever built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rowhaul._quantities import parse_bytes
from rowhaul.errors import ConfigError
from rowhaul.nn.config import EmbeddingBagConfig
from rowhaul.nn.features import FeatureGroup, group_features
from rowhaul.nn.jagged import KeyedJaggedTensor, KeyedTensor, as_keyed_jagged
from rowhaul.nn.local_rows import LocalRows
from rowhaul.nn.named_rows import NamedRows
from rowhaul.nn.pooled import PoolRows
from rowhaul.nn.row_source import Floats, Int64s, MovableRows, RowReader, RowSettings, RowSource
from rowhaul.optim import Adagrad, RowOptimizerRule
from rowhaul.store.tables import ON_UNKNOWN


class EmbeddingBagCollection(nn.Module):
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
        super().__init__()
        _check_tables(tables)
        if on_unknown not in ON_UNKNOWN:
            raise ConfigError(f"on_unknown must be one of {', '.join(ON_UNKNOWN)}, got {on_unknown!r}")
        self.optimizer = optimizer if optimizer is not None else Adagrad(lr=0.01)
        if pruning is not None and row_settings is not None:
            raise ConfigError("both pruning and row_settings say how rows are held; give one of them")
        self.seed, self.on_unknown = seed, on_unknown
        self.row_settings = pruning if pruning is not None else row_settings
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        self.device_memory = (
            parse_bytes(device_memory, "device_memory") if isinstance(device_memory, str) else device_memory
        )
        self._configs, self._is_weighted = list(tables), is_weighted
        self._keys, self._dims = _output_names_and_dims(tables)
        self._groups = group_features(tables)
        self._source: RowSource
        if self.row_settings is None:
            self._source = LocalRows(self._groups, self.optimizer, seed)
        else:
            self._source = self.row_settings.make_rows(self._groups, self.optimizer, seed, on_unknown)
        if isinstance(self._source, MovableRows) and self._source.device != self.device:
            self._source = self._moved(self._source)
        self._reader: RowReader = self._source
        # Backward reaches the rows through this: autograd needs an input that requires a gradient.
        self.anchor = torch.zeros((), requires_grad=True)

    @property
    def source(self) -> RowSource:
        """Where rows come from."""
        return self._source

    @property
    def feature_groups(self) -> list[FeatureGroup]:
        """The features by row size of their tables: what a row source is made for."""
        return self._groups

    def read_from(self, source: RowSource) -> None:
        """Read rows from another source from now on; those of the old one are left behind."""
        self._source.drop_gradients()
        self._source = self._reader = source

    @contextmanager
    def reading(self, reader: RowReader) -> Iterator[None]:
        """Read rows from elsewhere for a while; the source is left as it is."""
        self._reader = reader
        try:
            yield
        finally:
            self._reader = self._source

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether features carry a weight per id."""
        return self._is_weighted

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by rows, optimizer state and index."""
        return self._source.allocated_bytes

    def num_rows(self, table: str) -> int:
        """Count the rows that a table holds now."""
        return self._source.num_rows(table)

    def rows(self, table: str) -> Iterator[tuple[Int64s, Floats]]:
        """Yield all rows of a table as blocks of (keys, records); a record is values, then optimizer state.

        Records of pruned tables are whole values alone, zeros where pruned.
        """
        return self._source.rows(table)

    def load_rows(self, table: str, keys: Int64s, records: Floats) -> None:
        """Set rows of a table, creating those it lacks; the inverse of `rows`, but for rounding."""
        self._source.load_rows(table, keys, records)

    def stored_rows(self, table: str) -> Iterator[tuple[Int64s, Floats]]:
        """Yield all rows of a table as they are stored: rows in fewer bits as bytes, see `RowPacking`."""
        return self._stored_source().stored_rows(table)

    def load_stored(self, table: str, keys: Int64s, stored: Floats) -> None:
        """Set rows of a table to the bit; the inverse of `stored_rows`."""
        self._stored_source().load_stored(table, keys, stored)

    def _stored_source(self) -> NamedRows:
        if not isinstance(self._source, NamedRows):
            raise ConfigError("only rows of this process that are not pruned can be read as they are stored")
        return self._source

    def clear(self) -> None:
        """Drop every row of every table, and gradients that no step has used."""
        self._source.clear()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors of every feature, samples × Σ dim, in the order of tables and their features."""
        features = as_keyed_jagged(features)
        if features.values().dtype not in (torch.int64, torch.int32) or features.values().dim() != 1:
            raise ConfigError(
                f"keys must be int64 in one dimension, got {features.values().dtype} "
                f"of shape {tuple(features.values().shape)}"
            )
        weights = features.weights_or_none()
        if self._is_weighted != (weights is not None):
            given, needed = ("no ", "is_weighted=True") if self._is_weighted else ("", "is_weighted=False")
            raise ConfigError(f"the features carry {given}weights, but the collection has {needed}")
        if weights is not None and (weights.dim() != 1 or not weights.is_floating_point()):
            form = f"{weights.dtype} of shape {tuple(weights.shape)}"
            raise ConfigError(f"weights must be one floating-point number an id, got {form}")
        shape = (features.stride(), sum(self._dims))
        reads = self._reader.read(features, training=self.training, on_unknown=self.on_unknown)
        anchor = self.anchor if self.training else self.anchor.detach()
        dtype = self._groups[0].dtype
        pooled: Tensor = PoolRows.apply(anchor, weights, shape, dtype, reads)  # type: ignore[no-untyped-call]  # torch's apply has no types
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=pooled.to(self.device))

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Look up the rows of a batch that comes later, in any thread, beside training on others.

        Reading the same object later then takes less time and gives the same bits, whatever came in between.
        Its ids must not be changed meanwhile. Sources that gain nothing by it do nothing.
        """
        self._source.locate_early(features)

    def announce(self, features: KeyedJaggedTensor) -> None:
        """Announce a batch that is read in parts before the next step.

        Pruned rows are admitted and counted by batch: they are then the same as if it were read whole.
        """
        self._source.announce(features)

    def apply_gradients(self, lr: float, number: int) -> None:
        """Step every row touched since the last call; ``number`` counts steps from 1."""
        self._source.step(lr, number)

    def drop_gradients(self) -> None:
        """Drop row gradients that were not applied."""
        self._source.drop_gradients()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # After model.to("cuda") whole rows are there; others stay in host memory, and vectors go there.
        self.device = fn(torch.empty(0)).device
        if isinstance(self._source, MovableRows) and self._source.device != self.device:
            self.read_from(self._moved(self._source))
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's method has no types

    def _moved(self, source: MovableRows) -> RowSource:
        return source.moved_to(self.device, self._groups, self.optimizer, self.seed, self.device_memory)

    def extra_repr(self) -> str:
        """The tables, for ``print(model)``."""
        tables = ", ".join(f"{config.name}: {config.embedding_dim}" for config in self._configs)
        return f"{{{tables}}}, optimizer={self.optimizer}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, array in self._source.state().items():
            destination[f"{prefix}{name}"] = torch.from_numpy(array.copy())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        _, _, missing, *_ = arguments
        names = self._source.state_names()
        absent = [prefix + name for name in names if prefix + name not in state_dict]
        missing += absent
        if not absent:  # all or nothing: rows are replaced only when all are there
            self._source.load_state({name: state_dict.pop(prefix + name).cpu().numpy() for name in names})
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def _check_tables(tables: Sequence[EmbeddingBagConfig]) -> None:
    if not tables:
        raise ConfigError("EmbeddingBagCollection: no tables; give at least one EmbeddingBagConfig")
    names = [config.name for config in tables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two tables are called {twice[0]!r}; give every table its own name")
    if len({config.data_type for config in tables}) > 1:
        raise ConfigError("tables of one collection must share a data_type; make one collection for each")


def _output_names_and_dims(tables: Sequence[EmbeddingBagConfig]) -> tuple[list[str], list[int]]:
    features = [feature for config in tables for feature in config.feature_names]
    shared = {feature for feature in features if features.count(feature) > 1}
    names = [
        f"{feature}@{config.name}" if feature in shared else feature
        for config in tables
        for feature in config.feature_names
    ]
    return names, [config.embedding_dim for config in tables for _ in config.feature_names]
