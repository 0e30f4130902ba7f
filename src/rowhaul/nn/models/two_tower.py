"""Two towers (Huang et al., 2013; Covington et al., 2016): a vector for the user, one for the item.

The score is their product, so that an index of item vectors finds a user's best items without scoring all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from rowhaul._nearest import did_you_mean
from rowhaul.errors import ConfigError
from rowhaul.nn.batch import Batch
from rowhaul.nn.jagged import JaggedTensor
from rowhaul.nn.layers import MLP, LayerFactory
from rowhaul.nn.losses import Losses, per_sample_loss, scale_of
from rowhaul.nn.models.base import MLPOptions, RecommendationModel, checked_names
from rowhaul.nn.models.sequence import (
    check_negatives_loss,
    labelled_losses,
    losses_with_drawn,
    owners,
    summed_rows,
)


@dataclass(frozen=True)
class TwoTowerOptions(MLPOptions):
    """Options of `TwoTower`.

    Args:
        hidden: hidden layers of each tower.
        item: features of the item; by default the one that negatives are drawn against, else the target of
            a history, else the second of two features. All others are the user's.
        negatives: the feature with ids that were drawn against the item; empty: there is none, and labels
            alone tell good items from others.
        negatives_loss: ``"binary"``, each of them counts as an item with label 0, or ``"softmax"``, the item
            has to be found among them.
        size: numbers in a vector.
        temperature: 0 leaves vectors as they are; otherwise they have length 1, and the score is their
            cosine divided by this.
    """

    hidden: tuple[int, ...] = (128,)
    item: tuple[str, ...] = ()
    negatives: str = ""
    negatives_loss: str = "binary"
    size: int = 32
    temperature: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_negatives_loss(self.negatives_loss)
        object.__setattr__(self, "item", checked_names("item", self.item))
        if not isinstance(self.size, int) or self.size < 1:
            raise ConfigError(f"size must be a number from 1, got {self.size!r}")
        if not isinstance(self.temperature, int | float) or not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 or a positive number, got {self.temperature!r}")


class _Tower(nn.Module):
    """The mean row of each feature, side by side, through an MLP to one vector."""

    def __init__(
        self, layers: LayerFactory, features: Sequence[str], inputs: int, options: TwoTowerOptions
    ) -> None:
        super().__init__()
        self.features, self.scaled = tuple(features), options.temperature > 0
        self.mlp: MLP = layers.mlp(inputs, options.hidden, options.dropout)
        self.out = layers.linear((inputs, *options.hidden)[-1], options.size)

    def forward(self, inputs: Tensor, index: Tensor) -> Tensor:
        """From inputs x widths to inputs x size."""
        vectors: Tensor = self.out(self.mlp(inputs, index))
        return normalize(vectors, dim=1) if self.scaled else vectors


class TwoTower(RecommendationModel):
    """logit = ⟨u, v⟩ + b, u = user tower([mean rows of its features, dense]), v = item tower(mean rows).

    Training adds, for each negative n of a sample, the loss of the logit ⟨u, v_n⟩ + b with label 0, divided
    by their number, or asks for the item among them (`TwoTowerOptions.negatives_loss`). The bias is the same
    for all items, so that products alone rank them.
    """

    Options = TwoTowerOptions
    is_pooled: ClassVar[bool] = False
    reads_negatives: ClassVar[bool] = True

    def __init__(
        self,
        collection: nn.Module,
        num_dense: int,
        options: TwoTowerOptions = TwoTowerOptions(),
        seed: int = 0,
    ) -> None:
        super().__init__(collection, num_dense)
        width_of = dict(zip(self.features, self.widths, strict=True))
        for name in (*options.item, *([options.negatives] if options.negatives else [])):
            if name not in width_of:
                near = did_you_mean(name, self.features)
                raise ConfigError(
                    f"TwoTower: no id feature {name!r}{near}; there are {', '.join(self.features)}"
                )
        users = [name for name in self.features if name not in {*options.item, options.negatives}]
        if not options.item or not users:
            raise ConfigError(
                "TwoTower needs features of the item and others of the user, got item "
                f"{list(options.item)} of {', '.join(self.features)}; say which are the item's "
                "(option `item`)"
            )
        if options.negatives and len(options.item) > 1:
            raise ConfigError(
                f"TwoTower: negatives are ids alone, but the item has {', '.join(options.item)}, and the "
                "others of a drawn id are not known; leave out all but one, or learn from labels alone"
            )
        self.item, self.negatives = options.item, options.negatives
        self.negatives_loss = options.negatives_loss
        self.temperature = options.temperature or 1.0
        layers = LayerFactory(seed)
        self.user_tower = _Tower(layers, users, sum(width_of[name] for name in users) + num_dense, options)
        self.item_tower = _Tower(layers, self.item, sum(width_of[name] for name in self.item), options)
        self.bias = nn.Parameter(torch.zeros(()))

    @classmethod
    def roles(
        cls, tables: Mapping[str, Sequence[str]], histories: Sequence[str], negatives: Mapping[str, str]
    ) -> dict[str, Any]:
        """Find out from a schema which features are the item's; options of the user win."""
        if len(negatives) > 1:
            raise ConfigError(
                f"two_tower reads one column of negatives, the schema draws {', '.join(negatives)}"
            )
        drawn = {"negatives": next(iter(negatives), ""), "item": tuple(negatives.values())}
        if negatives:
            return drawn
        every = [name for features in tables.values() for name in features]
        targets = [
            name
            for features in tables.values()
            if any(one in histories for one in features)
            for name in features
            if name not in histories
        ]
        return {"item": tuple(targets) or (tuple(every[1:]) if len(every) == 2 else ())}

    @classmethod
    def check_negatives(cls, options: TwoTowerOptions, negatives: Mapping[str, str]) -> None:
        """Refuse drawn ids that would be a feature of the user, or stand for another item than is scored."""
        for name, of in negatives.items():
            if options.negatives != name:
                raise ConfigError(
                    f"TwoTower: the schema draws {name!r}, which would describe the user, since the option "
                    f"`negatives` is {options.negatives!r}; leave out the option, or the column"
                )
            if options.item[:1] != (of,):
                raise ConfigError(
                    f"TwoTower: {name!r} is drawn against {of!r} (`negatives_of`), but the option `item` is "
                    f"{list(options.item)}; leave out the option, or draw against the item"
                )

    def forward(self, batch: Batch) -> Tensor:
        """Logits of the items, one per sample."""
        rows, dense = self._rows(batch)
        return self._logits(rows, self._user(rows, dense, batch.index), batch.index)

    def logits_and_losses(self, batch: Batch, losses: Losses = per_sample_loss) -> tuple[Tensor, Tensor]:
        """Logits of the items, and the loss of each sample with its negatives."""
        rows, dense = self._rows(batch)
        user = self._user(rows, dense, batch.index)
        logits = self._logits(rows, user, batch.index)
        per_sample = labelled_losses("TwoTower", logits, batch, losses)
        if self.negatives:
            drawn = rows[self.negatives]
            owner = owners(drawn.lengths().to(torch.int64))
            vectors = self.item_tower(drawn.values(), batch.index.index_select(0, owner))
            scores = self._scores(user.index_select(0, owner), vectors)
            loss = self.negatives_loss
            scale = scale_of(losses, batch)
            per_sample = losses_with_drawn(loss, per_sample, logits, scores, drawn, batch, scale)
        return logits, per_sample

    def user_vectors(self, batch: Batch) -> Tensor:
        """The vector of each sample's user, samples x size."""
        rows, dense = self._rows(batch)
        return self._user(rows, dense, batch.index)

    def item_vectors(self, batch: Batch) -> Tensor:
        """The vector of each sample's item, samples x size."""
        rows, _ = self._rows(batch)
        return self._item(rows, batch.index)

    def _rows(self, batch: Batch) -> tuple[dict[str, JaggedTensor], Tensor]:
        self.check_dense(batch)
        rows: dict[str, JaggedTensor] = self.collection(batch.ids)
        return rows, batch.dense.to(next(iter(rows.values())).values().dtype)

    def _user(self, rows: Mapping[str, JaggedTensor], dense: Tensor, index: Tensor) -> Tensor:
        inputs = torch.cat([*(mean_rows(rows[name]) for name in self.user_tower.features), dense], dim=1)
        vectors: Tensor = self.user_tower(inputs, index)
        return vectors

    def _item(self, rows: Mapping[str, JaggedTensor], index: Tensor) -> Tensor:
        vectors: Tensor = self.item_tower(
            torch.cat([mean_rows(rows[name]) for name in self.item], dim=1), index
        )
        return vectors

    def _logits(self, rows: Mapping[str, JaggedTensor], user: Tensor, index: Tensor) -> Tensor:
        return self._scores(user, self._item(rows, index))

    def _scores(self, users: Tensor, items: Tensor) -> Tensor:
        return (users * items).sum(1) / self.temperature + self.bias


def mean_rows(rows: JaggedTensor) -> Tensor:
    """The mean of a feature's rows, samples x dim; zeros where there is none."""
    return summed_rows(rows) / rows.lengths().clamp(min=1).unsqueeze(1)
