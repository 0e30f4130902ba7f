"""`EmbeddingCollection`: the rows of every id, one by one, for models that read histories."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.nn.collection import TableCollection, check_tables, chosen_settings, output_names
from rowhaul.nn.config import EmbeddingConfig
from rowhaul.nn.features import UnpooledGroup
from rowhaul.nn.jagged import JaggedTensor, KeyedJaggedTensor
from rowhaul.nn.pooled import PooledRead, as_array, is_worth_threads
from rowhaul.nn.row_source import MovableRows, RowSettings, RowSource
from rowhaul.nn.threads import run_all
from rowhaul.nn.uncompiled import uncompiled
from rowhaul.optim import RowOptimizerRule


class EmbeddingCollection(TableCollection):
    """Reads the row of every id, as TorchRec's module of this name; nothing is pooled, cut or padded.

    Gradients of a row are summed over all places that read it, in whichever feature, before its one step.
    `JaggedTensor.to_padded_dense` turns the rows of a feature into samples × length × dim. Rows are in host
    memory, vectors go to ``device``.

    Args:
        tables: one configuration a table; all of one data type. Unlike TorchRec's, their rows may differ in
            size.
        device: where vectors go.
        need_indices: return the ids as the ``weights`` of the result.
        optimizer: the row optimizer; its state lives in the row's record.
        seed: with table name and key it determines every initial value.
        on_unknown: what unknown keys read in ``eval()`` mode, see `EmbeddingBagCollection`.
        pruning: keep only the useful parts of rows in memory (`rowhaul.pruning.PruneSettings`).
        row_settings: how rows are held, see `EmbeddingBagCollection`.

    Example:
        >>> tables = [EmbeddingConfig(embedding_dim=4, name="items", feature_names=["item", "history"])]
        >>> collection = EmbeddingCollection(tables, optimizer=rowhaul.optim.Adagrad(lr=0.1))
        >>> ids = KeyedJaggedTensor.from_lengths_sync(
        ...     ["item", "history"], torch.tensor([7, 9, 1, 7]), lengths=torch.tensor([1, 1, 2, 0]))
        >>> collection(ids)["history"].to_padded_dense(50).shape
        torch.Size([2, 50, 4])
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        optimizer: RowOptimizerRule | None = None,
        seed: int = 0,
        on_unknown: str = "init",
        pruning: RowSettings | None = None,
        row_settings: RowSettings | None = None,
    ) -> None:
        check_tables(type(self).__name__, tables, EmbeddingConfig)
        settings = chosen_settings(pruning, row_settings)
        groups = [UnpooledGroup(config) for config in tables]
        super().__init__(tables, groups, device, optimizer, seed, on_unknown, settings)
        self._need_indices = need_indices
        self._keys = output_names(tables)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, in order."""
        return list(self._configs)

    def need_indices(self) -> bool:
        """Whether the ids come back as ``weights``."""
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of the results, table by table."""
        names = iter(self._keys)
        return [[next(names) for _ in config.feature_names] for config in self._configs]

    @uncompiled
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows of every feature's ids, by feature, or ``feature@table`` where it reads several tables.

        Weights of ids are handed on as they are.
        """
        features = self._ids(features)
        if self._need_indices and features.weights_or_none() is not None:
            raise ConfigError(
                "need_indices returns ids as weights, but the features carry weights; give one of them"
            )
        found = self._reader.read(features, training=self.training, on_unknown=self.on_unknown)
        reads = cast(Sequence[PooledRead], found)  # of `UnpooledGroup`s, whose rows are found on a CPU
        anchor = self.anchor if self.training else self.anchor.detach()
        vectors = ReadRows.apply(anchor, self._groups[0].dtype, reads)  # type: ignore[no-untyped-call]  # torch's apply has no types
        by_table = {read.group.specs[0].name: one for read, one in zip(reads, vectors, strict=True)}
        ids, names, out = features.to_dict(), iter(self._keys), {}
        for config in self._configs:
            sizes = [len(ids[name].values()) for name in config.feature_names]
            parts = torch.split_with_sizes(by_table[config.name].to(self.device), sizes)
            for name, part in zip(config.feature_names, parts, strict=True):
                out[next(names)] = self._jagged(ids[name], part.detach() if config.frozen else part)
        return out

    def _jagged(self, ids: JaggedTensor, rows: Tensor) -> JaggedTensor:
        weights = ids.values() if self._need_indices else ids.weights_or_none()
        there = weights.to(self.device) if weights is not None else None
        return ids.with_values(rows, there)

    def _moved(self, source: MovableRows) -> RowSource:
        return cast(RowSource, source)


class ReadRows(torch.autograd.Function):
    """A row per id forward, table by table; on the way back row gradients stay with their source."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, dtype: torch.dtype, reads: Sequence[PooledRead]
    ) -> tuple[Tensor, ...]:
        """Vectors of each read, ids × dim; ``anchor`` only ties the rows into the graph."""
        outs = tuple(
            torch.empty((len(read.lookup.inverse), read.group.dim), dtype=dtype, device=read.device)
            for read in reads
        )
        in_threads = _in_threads(reads, outs)
        run_all(
            [partial(read.pool, None, as_array(out)) for read, out in zip(reads, outs, strict=True)],
            in_threads,
        )
        ctx.reads = reads
        ctx.save_for_backward(anchor)  # so that a second backward is noticed
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Keep row gradients: those of one row summed, in the order of the ids."""
        _ = ctx.saved_tensors
        there = [
            one.detach().to(read.device).contiguous() for read, one in zip(ctx.reads, gradients, strict=True)
        ]
        if ctx.needs_input_grad[0]:
            kept = zip(ctx.reads, there, strict=True)
            run_all(
                [partial(read.keep_gradients, None, as_array(one)) for read, one in kept],
                _in_threads(ctx.reads, there),
            )
        return None, None, None


def _in_threads(reads: Sequence[PooledRead], vectors: Sequence[Tensor]) -> bool:
    on_cpu = reads[0].device.type == "cpu"
    return on_cpu and is_worth_threads(sum(one.numel() for one in vectors))
