"""`EmbeddingBagCollection`: many tables over raw keys, pooled in one pass, trained in place.

Rows live in the store, not in parameters: the backward pass leaves one summed gradient per distinct
row, and `RowOptimizer` turns it into a step on the record itself. Nothing the size of a table is
ever built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.nn.config import EmbeddingBagConfig
from rowhaul.nn.jagged import KeyedJaggedTensor, KeyedTensor, as_keyed_jagged
from rowhaul.nn.pooled import FeatureGroup, PooledRead, PoolRows, is_worth_threads
from rowhaul.nn.threads import run_all
from rowhaul.optim import Adagrad, RowOptimizerRule
from rowhaul.pruning.pool import PruneSettings
from rowhaul.pruning.pool.collection import CollectionPruning, make_pruned_groups
from rowhaul.pruning.pool.state import load_state, names_of_state, state_of
from rowhaul.store.tables import ON_UNKNOWN


class EmbeddingBagCollection(nn.Module):
    """Pools the rows of every feature into one vector per sample, as TorchRec's module of this name.

    Keys are any int64. While ``training``, a key seen for the first time gets a row made from
    (seed, table, key); in ``eval()`` mode nothing is inserted, rows take no gradient, and unknown
    keys read as ``on_unknown`` says: ``"init"`` (the values the row would start with), ``"default"``
    (zeros) or ``"error"``.

    Args:
        tables: one configuration a table; all of one data type.
        is_weighted: whether features carry a weight per id.
        device: where pooled vectors go; rows stay in host memory.
        optimizer: the row optimizer; its state lives in the row's record.
        seed: with table name and key it determines every initial value.
        on_unknown: see above.
        pruning: keep only the useful parts of rows in memory. Whatever is pruned reads as zeros; keys without
            a row, too, since rows that hold nothing are forgotten.

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
        pruning: PruneSettings | None = None,
    ) -> None:
        super().__init__()
        _check_tables(tables)
        if on_unknown not in ON_UNKNOWN:
            raise ConfigError(f"on_unknown must be one of {', '.join(ON_UNKNOWN)}, got {on_unknown!r}")
        self.optimizer = optimizer if optimizer is not None else Adagrad(lr=0.01)
        self.seed, self.on_unknown = seed, on_unknown
        # Whether training inserts rows it has not seen; a worker's rows come and go as its plan says.
        self.inserts_rows = True
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        self._configs, self._is_weighted = list(tables), is_weighted
        self._keys, self._dims = _output_names_and_dims(tables)
        self.prune_settings = pruning
        self.pruning: CollectionPruning | None = None  # of rows in this process
        self._groups: list[FeatureGroup]
        if pruning is None:
            grouped = _grouped(tables)
            self._groups = [FeatureGroup(*some, self.optimizer, seed) for some in grouped]
        else:
            _check_prunable(on_unknown)
            self.pruning = make_pruned_groups(tables, _grouped(tables), self.optimizer, seed, pruning)
            self._groups = list(self.pruning.groups)
        # Backward reaches the rows through this: autograd needs an input that requires a gradient.
        self.anchor = torch.zeros((), requires_grad=True)

    @property
    def groups(self) -> list[FeatureGroup]:
        """The tables by row size, as the runtime moves their rows; no order of theirs means anything."""
        return self._groups

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether features carry a weight per id."""
        return self._is_weighted

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by rows, optimizer state and index."""
        pools = self.pruning.pool_bytes if self.pruning else 0
        return sum(group.tables.allocated_bytes for group in self._groups) + pools

    def num_rows(self, table: str) -> int:
        """Rows that a table holds now."""
        group, position = self._table(table)
        return int(group.tables.index.num_keys[position])

    def rows(self, table: str) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """All rows of a table as blocks of (keys, records); a record is values, then optimizer state.

        Of pruned tables it is the whole row's values alone, zeros where pruned.
        """
        group, position = self._table(table)
        return group.tables.blocks(position)

    def load_rows(self, table: str, keys: npt.NDArray[np.int64], records: npt.NDArray[Any]) -> None:
        """Set rows of a table, creating those it lacks; the inverse of `rows`."""
        group, position = self._table(table)
        if self.pruning is not None:
            raise ConfigError(f"table {table!r} is pruned: its rows come from a checkpoint or a state_dict")
        keys, records = np.asarray(keys), np.asarray(records)
        self._check_records(table, keys, records)
        group.tables.load(position, np.ascontiguousarray(keys), records)

    def _check_records(self, table: str, keys: npt.NDArray[Any], records: npt.NDArray[Any]) -> None:
        if keys.dtype != np.int64 or keys.ndim != 1 or len(np.unique(keys)) != len(keys):
            raise CheckpointError(
                f"table {table!r}: keys must be different int64 numbers in one dimension, "
                f"got {keys.dtype} of shape {keys.shape}"
            )
        tables = self._table(table)[0].tables
        if records.shape != (len(keys), tables.arena.width):
            raise CheckpointError(
                f"table {table!r}: {len(keys)} keys with records of shape {records.shape}; this model "
                f"needs {tables.arena.width} elements a record (dim {tables.dim}, {self.optimizer.name})"
            )

    def clear(self) -> None:
        """Forget every row of every table, and gradients that no step has used."""
        self.drop_gradients()
        if self.pruning is not None:
            self.pruning.clear()
            return
        for group in self._groups:
            group.tables.clear()

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
        insert = self.training and self.inserts_rows
        on_unknown = "init" if self.training else self.on_unknown
        in_parallel = is_worth_threads(shape[0] * shape[1])
        reads: list[PooledRead]
        if self.pruning is not None:
            reads = self.pruning.read(features, insert, in_parallel)
        else:
            reads = run_all(
                [
                    partial(group.read, features, insert=insert, on_unknown=on_unknown)
                    for group in self._groups
                ],
                in_parallel,
            )
        anchor = self.anchor if self.training else self.anchor.detach()
        pooled: Tensor = PoolRows.apply(anchor, weights, shape, reads)  # type: ignore[no-untyped-call]
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=pooled.to(self.device))

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Look up the rows of a batch that comes later, in any thread, beside training on others.

        Reading the same object later then takes less time and gives the same bits, whatever came in between.
        Its ids must not be changed meanwhile. Only pruned rows are found early; of others nothing happens.
        """
        if self.pruning is not None:
            self.pruning.locate_early(features)

    def apply_gradients(self, lr: float, number: int) -> None:
        """Step every row touched since the last call; ``number`` counts steps from 1."""
        num_values = sum(gradients.size for group in self._groups for _, gradients in group.pending)
        run_all([partial(group.step, lr, number) for group in self._groups], is_worth_threads(num_values))
        if self.pruning is not None:
            self.pruning.finish_step(number)

    def spread(self) -> None:
        """Have pruned rows come from a cluster, which prunes them, instead of tables here.

        Rows are forgotten. Whoever brings others tells every group where to get them from.
        """
        self.drop_gradients()
        self.pruning = None
        self._groups = [FeatureGroup(*some, self.optimizer, self.seed) for some in _grouped(self._configs)]

    def drop_gradients(self) -> None:
        """Forget row gradients that were not applied."""
        for group in self._groups:
            group.pending.clear()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # After model.to("cuda") vectors go there; rows stay in host memory.
        self.device = fn(torch.empty(0)).device
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """The tables, for ``print(model)``."""
        tables = ", ".join(f"{config.name}: {config.embedding_dim}" for config in self._configs)
        return f"{{{tables}}}, optimizer={self.optimizer}"

    def _table(self, name: str) -> tuple[FeatureGroup, int]:
        for group in self._groups:
            for position, spec in enumerate(group.tables.tables):
                if spec.name == name:
                    return group, position
        known = ", ".join(config.name for config in self._configs)
        raise ConfigError(f"no table {name!r}; the tables are {known}")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.pruning is not None:
            for name, array in state_of(self.pruning, [one.name for one in self._configs]).items():
                destination[f"{prefix}{name}"] = torch.from_numpy(array.copy())
            return
        for config in self._configs:
            blocks = list(self.rows(config.name))
            width = self._table(config.name)[0].tables.arena.width
            keys = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in blocks)])
            empty = np.empty((0, width), self._groups[0].tables.dtype)
            records = np.concatenate([empty, *(records for _, records in blocks)])
            destination[f"{prefix}{config.name}.keys"] = torch.from_numpy(keys)
            destination[f"{prefix}{config.name}.records"] = torch.from_numpy(records)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        _, _, missing, *_ = arguments
        if self.pruning is not None:
            missing += self._load_pruned(self.pruning, state_dict, prefix)
            super()._load_from_state_dict(state_dict, prefix, *arguments)
            return
        given: dict[str, list[npt.NDArray[Any]]] = {}
        for config in self._configs:
            names = [f"{prefix}{config.name}.{part}" for part in ("keys", "records")]
            absent = [name for name in names if name not in state_dict]
            missing += absent
            if not absent:
                given[config.name] = [state_dict.pop(name).cpu().numpy() for name in names]
                self._check_records(config.name, *given[config.name])
        if len(given) == len(self._configs):  # all or nothing: rows are replaced only when all are there
            self.clear()
            for table, (keys, records) in given.items():
                self.load_rows(table, keys, records)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _load_pruned(self, pruning: CollectionPruning, state_dict: Any, prefix: str) -> list[str]:
        """Replace all pruned rows, unless some part is missing; returns what is."""
        tables = [config.name for config in self._configs]
        names = names_of_state(pruning, tables)
        absent = [prefix + name for name in names if prefix + name not in state_dict]
        if not absent:
            self.drop_gradients()
            load_state(pruning, tables, {name: state_dict.pop(prefix + name).cpu().numpy() for name in names})
        return absent


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


def _grouped(tables: Sequence[EmbeddingBagConfig]) -> list[tuple[list[EmbeddingBagConfig], list[int]]]:
    """Tables of one row size together, but in as many groups as threads can share the work of.

    Each group's tables and the columns of the output where their vectors begin.
    """
    widths = [config.embedding_dim * len(config.feature_names) for config in tables]
    first_columns = [sum(widths[:position]) for position in range(len(tables))]
    num_threads = torch.get_num_threads()
    groups = []
    for dim in dict.fromkeys(config.embedding_dim for config in tables):
        members = [position for position, config in enumerate(tables) if config.embedding_dim == dim]
        size = -(-len(members) // num_threads)
        for begin in range(0, len(members), size):
            some = members[begin : begin + size]
            groups.append(([tables[p] for p in some], [first_columns[p] for p in some]))
    return groups


def _check_prunable(on_unknown: str) -> None:
    if on_unknown == "error":
        raise ConfigError(
            "on_unknown='error' does not go with pruning: rows that were pruned away cannot be told from "
            "unknown ones, and read as zeros; use 'init' or 'default'"
        )
