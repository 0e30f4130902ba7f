"""What all models share: they read a batch through a collection and return one logit per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from rowhaul.errors import ConfigError, DataError
from rowhaul.nn.batch import Batch
from rowhaul.nn.collection import TableCollection
from rowhaul.nn.losses import Losses, per_sample_loss


@dataclass(frozen=True)
class MLPOptions:
    """Options of a model with one MLP.

    Args:
        hidden: sizes of its hidden layers.
        dropout: probability of dropping an output of a hidden layer in training.
    """

    hidden: tuple[int, ...] = (256, 128)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", checked_sizes("hidden", self.hidden))
        check_dropout(self.dropout)


class RecommendationModel(nn.Module):
    """Base of the models: the collection, what it yields, the dense columns.

    Args:
        collection: the embedding tables, rows `row_width` wide.
        num_dense: number of dense columns of a batch, 0 or more.
    """

    Options: ClassVar[type[Any]]
    least_tasks: ClassVar[int] = 1  # labels that it predicts, ...
    most_tasks: ClassVar[int] = 1  # ... and at most
    learns_from_all: ClassVar[bool] = False  # whether `targets` has labels for samples that have none
    is_pooled: ClassVar[bool] = True  # whether the collection pools rows, or gives them one by one
    reads_negatives: ClassVar[bool] = False  # whether it learns from ids that the reader draws

    def __init__(self, collection: nn.Module, num_dense: int) -> None:
        super().__init__()
        self.collection = collection
        self.num_dense = num_dense
        configs = cast(TableCollection, collection).table_configs()
        read = [(name, config.embedding_dim) for config in configs for name in config.feature_names]
        self.features = tuple(name for name, _ in read)
        self.widths = tuple(width for _, width in read)

    @classmethod
    def roles(
        cls, tables: Mapping[str, Sequence[str]], histories: Sequence[str], negatives: Mapping[str, str]
    ) -> dict[str, Any]:
        """Options that follow from a schema: which features are histories, and negatives of what."""
        return {}

    @classmethod
    def check_negatives(cls, options: Any, negatives: Mapping[str, str]) -> None:
        """Refuse options that contradict what a schema draws: negatives, and the features they are of."""

    @classmethod
    def row_width(cls, embedding_dim: int) -> int:
        """Columns that a row needs for embeddings of this size."""
        return embedding_dim

    def forward(self, batch: Batch) -> Tensor:
        """Logits, one per sample."""
        pooled, dense = self.read(batch)
        return self.logits(pooled, dense, batch.index)

    def logits(self, pooled: Tensor, dense: Tensor, index: Tensor) -> Tensor:
        """Logits from what `read` returns: the part of a model that has no rows.

        ``index`` are the global indices of the samples, which only dropout reads.
        """
        # Not abstract: a model of one's own may have its own forward instead.
        raise NotImplementedError(f"{type(self).__name__} says neither how to make logits nor forward")

    def targets(self, labels: Tensor) -> Tensor:
        """What is learned and measured of several labels (samples x labels, NaN: missing)."""
        return labels

    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Pooled rows (samples x sum of widths) and dense columns, both of the rows' type."""
        self.check_dense(batch)
        pooled: Tensor = self.collection(batch.ids).values()
        return pooled, batch.dense.to(pooled.dtype)

    def logits_and_losses(self, batch: Batch, losses: Losses = per_sample_loss) -> tuple[Tensor, Tensor]:
        """Logits and, to learn from, the loss of each sample, which ``losses`` makes of logits and labels."""
        logits = self(batch)
        return logits, losses(logits, batch)

    def check_dense(self, batch: Batch) -> None:
        """Refuse a batch with other dense columns than the model was built for."""
        num_dense = batch.dense.shape[1]
        if num_dense != self.num_dense:
            raise DataError(
                f"the model was built for {self.num_dense} dense columns, the batch has {num_dense}"
            )

    def common_width(self) -> int:
        """Columns of every feature, for a model that combines features element by element."""
        if len(set(self.widths)) > 1:
            given = ", ".join(
                f"{name}: {width}" for name, width in zip(self.features, self.widths, strict=True)
            )
            raise ConfigError(f"{type(self).__name__} needs rows of one width in all tables, got {given}")
        return self.widths[0]

    def check_linear_column(self) -> None:
        """Refuse rows that have no room for an embedding beside the linear weight."""
        if min(self.widths) < 2:
            narrow = self.features[self.widths.index(min(self.widths))]
            raise ConfigError(
                f"{type(self).__name__} needs rows of embedding size + 1 (the last column is the linear "
                f"weight), but {narrow!r} has rows of 1"
            )


def checked_sizes(name: str, given: Any) -> tuple[int, ...]:
    """Sizes of layers as a tuple, from any sequence of positive integers."""
    sizes = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if sizes is None or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"{name} must be a list of layer sizes such as [256, 128], got {given!r}")
    return sizes


def checked_names(name: str, given: Any) -> tuple[str, ...]:
    """Names of id features as a tuple, from any sequence of them, or from one."""
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
        raise ConfigError(f"{name} must be a list of id features, got {given!r}")
    return tuple(names)


def check_dropout(given: float) -> None:
    """Refuse what is no probability below 1."""
    if not isinstance(given, int | float) or not 0 <= given < 1:
        raise ConfigError(f"dropout must be at least 0 and below 1, got {given!r}")
