"""DIN (Zhou et al., 2018): what of a user's history counts depends on the item in question."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rowhaul.nn.batch import Batch
from rowhaul.nn.layers import LayerFactory
from rowhaul.nn.models.base import MLPOptions, checked_names, checked_sizes
from rowhaul.nn.models.sequence import SequenceModel, owners, summed, summed_rows


@dataclass(frozen=True)
class DINOptions(MLPOptions):
    """Options of `DIN`.

    Args:
        history: features with the ids of the past, oldest first; by default those with ``max_length``.
        target: for each, the feature with the id in question; by default the other feature of its table.
        attention: hidden layers that weigh an event of the history against the target.
        softmax: whether weights add up to 1; the paper leaves them as they are, so that the sum says how much
            of the history matters.
    """

    history: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    attention: tuple[int, ...] = (64, 32)
    softmax: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("history", "target"):
            object.__setattr__(self, name, checked_names(name, getattr(self, name)))
        object.__setattr__(self, "attention", checked_sizes("attention", self.attention))


class DIN(SequenceModel):
    """logit = MLP([others, t, u, t ⊙ u, dense]), u = Σ_i a(h_i, t) h_i, a = MLP([h_i, t, t − h_i, t ⊙ h_i]).

    t is the target, h_i an event of the history; with several histories (item, category) both are all of
    their rows side by side. Other features are summed over their ids. Nothing is padded: only real events
    are computed.
    """

    Options = DINOptions

    def __init__(
        self, collection: nn.Module, num_dense: int, options: DINOptions = DINOptions(), seed: int = 0
    ) -> None:
        super().__init__(collection, num_dense, options.history, options.target)
        self.softmax = options.softmax
        taken = {*self.history, *self.target}
        self.others = tuple(name for name in self.features if name not in taken)
        width = sum(self.width_of[name] for name in self.target)
        layers = LayerFactory(seed)
        self.attention = layers.mlp(4 * width, options.attention)
        self.weigh = layers.linear((4 * width, *options.attention)[-1], 1)
        inputs = 3 * width + sum(self.width_of[name] for name in self.others) + num_dense
        self.mlp = layers.mlp(inputs, options.hidden, options.dropout)
        self.out = layers.linear((inputs, *options.hidden)[-1], 1)

    def forward(self, batch: Batch) -> Tensor:
        """Logits, one per sample."""
        rows, dense = self.rows(batch)
        target = torch.cat([summed_rows(rows[name]) for name in self.target], dim=1)
        interest = self._interest(*self.histories(rows), target)
        others = [summed_rows(rows[name]) for name in self.others]
        inputs = torch.cat([*others, target, interest, target * interest, dense], dim=1)
        logits: Tensor = self.out(self.mlp(inputs, batch.index)).squeeze(1)
        return logits

    def _interest(self, events: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Sum each sample's events by their weights."""
        owner = owners(lengths)
        wanted = target.index_select(0, owner)
        pairs = torch.cat([events, wanted, wanted - events, wanted * events], dim=1)
        weights = self.weigh(self.attention(pairs, owner))
        if self.softmax:
            weights = self._normalised(weights, owner, len(lengths))
        return summed(weights * events, owner, len(lengths))

    @staticmethod
    def _normalised(weights: Tensor, owner: Tensor, num_samples: int) -> Tensor:
        """Softmax over each sample's events."""
        shift = weights.new_full((num_samples, 1), -torch.inf)
        shift = shift.scatter_reduce(0, owner.unsqueeze(1), weights.detach(), "amax")
        exponents = (weights - shift.index_select(0, owner)).exp()
        return exponents / summed(exponents, owner, num_samples).index_select(0, owner)
