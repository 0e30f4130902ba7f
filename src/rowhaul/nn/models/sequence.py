"""What models of histories share: rows one by one, and which features are histories of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from rowhaul.errors import ConfigError, DataError
from rowhaul.nn.batch import Batch
from rowhaul.nn.jagged import JaggedTensor
from rowhaul.nn.losses import Losses
from rowhaul.nn.models.base import RecommendationModel

NEGATIVES_LOSSES = ("binary", "softmax")


class SequenceModel(RecommendationModel):
    """Base of models over an `EmbeddingCollection`: a history and its target read one table.

    Args:
        collection: the embedding tables; a history and its target read one table.
        num_dense: number of dense columns of a batch.
        history: features whose ids are in order, oldest first; all of one length in a sample.
        target: for each history, the feature that has the item in question.
    """

    is_pooled: ClassVar[bool] = False

    def __init__(
        self, collection: nn.Module, num_dense: int, history: Sequence[str], target: Sequence[str]
    ) -> None:
        super().__init__(collection, num_dense)
        name = type(self).__name__
        if not history or len(history) != len(target):
            raise ConfigError(
                f"{name} needs a history and, in the same table, its target; got history {list(history)} and "
                f"target {list(target)}: set `max_length` on the history's column in the schema, or the "
                "options `history` and `target`"
            )
        for feature in (*history, *target):
            if feature not in self.features:
                raise ConfigError(f"{name}: no id feature {feature!r}; there are {', '.join(self.features)}")
        self.history, self.target = tuple(history), tuple(target)
        self.width_of = dict(zip(self.features, self.widths, strict=True))

    @classmethod
    def roles(
        cls, tables: Mapping[str, Sequence[str]], histories: Sequence[str], negatives: Mapping[str, str]
    ) -> dict[str, Any]:
        """Find out from a schema which features are what; options of the user win.

        The target of a history is the other feature of its table, but for negatives.
        """
        pairs = []
        for features in tables.values():
            targets = [name for name in features if name not in histories and name not in negatives]
            pairs += [(name, targets[0]) for name in features if name in histories and len(targets) == 1]
        return {"history": tuple(name for name, _ in pairs), "target": tuple(name for _, name in pairs)}

    def rows(self, batch: Batch) -> tuple[dict[str, JaggedTensor], Tensor]:
        """Rows of every id, by feature, and dense columns, both of the rows' type."""
        self.check_dense(batch)
        rows: dict[str, JaggedTensor] = self.collection(batch.ids)
        first = next(iter(rows.values())).values()
        return rows, batch.dense.to(first.dtype)

    def histories(self, rows: Mapping[str, JaggedTensor]) -> tuple[Tensor, Tensor]:
        """The vectors of all events, histories side by side (events x widths), and the histories' lengths."""
        first = rows[self.history[0]]
        for name in self.history[1:]:
            if not torch.equal(rows[name].lengths(), first.lengths()):
                raise DataError(
                    f"histories {self.history[0]!r} and {name!r} differ in length in a sample; each place "
                    "must be the same event: write them together, or name one of them (option `history`)"
                )
        values = [rows[name].values() for name in self.history]
        return torch.cat(values, dim=1) if len(values) > 1 else values[0], first.lengths().to(torch.int64)


def owners(lengths: Tensor) -> Tensor:
    """The sample of each id, from the number of ids in each sample."""
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)


def summed(values: Tensor, owner: Tensor, num_samples: int) -> Tensor:
    """Sum the vectors of each sample's ids; none give zeros."""
    return values.new_zeros((num_samples, *values.shape[1:])).index_add(0, owner, values)


def summed_rows(rows: JaggedTensor) -> Tensor:
    """The sum of a feature's rows, samples x dim."""
    lengths = rows.lengths().to(torch.int64)
    return summed(rows.values(), owners(lengths), len(lengths))


def labelled_losses(model: str, logits: Tensor, batch: Batch, losses: Losses) -> Tensor:
    """The loss of each sample, refused for samples without labels."""
    if batch.labels is None:
        raise DataError(f"{model} needs labels to learn from; name the label in the schema")
    return losses(logits, batch)


def check_negatives_loss(given: str) -> None:
    """Refuse what is not one of `NEGATIVES_LOSSES`."""
    if given not in NEGATIVES_LOSSES:
        raise ConfigError(f"negatives_loss must be one of {', '.join(NEGATIVES_LOSSES)}, got {given!r}")


def losses_with_drawn(
    loss: str,
    per_sample: Tensor,
    logits: Tensor,
    scores: Tensor,
    drawn: JaggedTensor,
    batch: Batch,
    scale: float,
) -> Tensor:
    """The loss of each sample with its negatives, one of `NEGATIVES_LOSSES`.

    Where a label is missing, negatives are learned from all the same with ``"binary"``, and not with others.

    Args:
        loss: ``"binary"``: the mean cross entropy of negatives' scores with label 0 is added. ``"softmax"``:
            the cross entropy of the item among itself and its negatives takes the place of a positive label's
            loss; other samples keep theirs.
        per_sample: losses without negatives.
        logits: of the samples' own items.
        scores: of the negatives.
        drawn: their rows.
        batch: the samples.
        scale: what ``per_sample`` was multiplied by, besides the samples' weights: see `scale_of`.
    """
    lengths = drawn.lengths().to(torch.int64)
    owner = owners(lengths)
    weights = scale if batch.weights is None else batch.weights.to(logits.dtype) * scale
    if loss == "binary":
        means = summed(softplus(scores), owner, len(lengths)) / lengths.clamp(min=1)
        return per_sample + means * weights
    highest = logits.detach().scatter_reduce(0, owner, scores.detach(), "amax")
    others = summed((scores - highest[owner]).exp(), owner, len(lengths))
    found = ((logits - highest).exp() + others).log() + highest - logits
    assert batch.labels is not None
    return torch.where(batch.labels.reshape(-1) > 0, found * weights, per_sample)
