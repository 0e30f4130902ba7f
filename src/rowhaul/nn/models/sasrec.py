"""SASRec (Kang & McAuley, 2018): the next item, by causal self-attention over a user's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rowhaul.errors import ConfigError
from rowhaul.nn.batch import Batch
from rowhaul.nn.jagged import JaggedTensor
from rowhaul.nn.layers import LayerFactory
from rowhaul.nn.losses import Losses, per_sample_loss, scale_of
from rowhaul.nn.models.base import check_dropout, checked_names
from rowhaul.nn.models.sequence import (
    SequenceModel,
    check_negatives_loss,
    labelled_losses,
    losses_with_drawn,
    owners,
    summed_rows,
)

_SCALE_OF_PLACES = 0.1  # of Glorot's range: rows start small, and places would drown them for many steps


@dataclass(frozen=True)
class SASRecOptions:
    """Options of `SASRec`.

    Args:
        history: the feature with the ids of the past, oldest first; by default the one with ``max_length``.
        target: the feature with the next id; by default the other feature of the history's table.
        negatives: the feature with ids that were drawn against the target; empty: there is none, and labels
            alone tell good items from others.
        negatives_loss: ``"binary"``, each of them counts as an item with label 0, or ``"softmax"``, the item
            has to be found among them.
        max_length: places of a history that have a vector of their own; longer ones are cut to the newest.
        blocks: self-attention blocks.
        heads: of attention; they divide the embedding size.
        dropout: probability of dropping an entry in training.
    """

    history: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    negatives: str = ""
    negatives_loss: str = "binary"
    max_length: int = 50
    blocks: int = 2
    heads: int = 1
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_dropout(self.dropout)
        check_negatives_loss(self.negatives_loss)
        for name in ("history", "target"):
            object.__setattr__(self, name, checked_names(name, getattr(self, name)))
        for name, least in (("max_length", 1), ("blocks", 0), ("heads", 1)):
            given = getattr(self, name)
            if not isinstance(given, int) or given < least:
                raise ConfigError(f"{name} must be a number from {least}, got {given!r}")


class SASRec(SequenceModel):
    """logit = ⟨s, e_target⟩, s = the last state of causal self-attention over the history.

    Training adds, for each negative n of a sample, the loss of the logit ⟨s, e_n⟩ with label 0, divided by
    their number, or asks for the target among them (`SASRecOptions.negatives_loss`). A state sees its own
    event and earlier ones alone. Places are counted from the newest event. A sample without a history has a
    state of its own.
    """

    Options = SASRecOptions
    reads_negatives: ClassVar[bool] = True

    def __init__(
        self, collection: nn.Module, num_dense: int, options: SASRecOptions = SASRecOptions(), seed: int = 0
    ) -> None:
        super().__init__(collection, num_dense, options.history, options.target)
        if len(self.history) > 1:
            raise ConfigError(f"SASRec reads one history, got {', '.join(self.history)}; name one: `history`")
        width = self.width_of[self.history[0]]
        if self.width_of[self.target[0]] != width:
            raise ConfigError("SASRec needs the history and its target in one table")
        taken = {*self.history, *self.target, options.negatives} - {""}
        unread = [name for name in self.features if name not in taken]
        if unread or num_dense:
            raise ConfigError(
                f"SASRec reads a history and items alone; leave out {', '.join(unread) or 'dense columns'} "
                "of the schema, or take din, which reads all features"
            )
        if options.negatives and options.negatives not in self.features:
            raise ConfigError(f"SASRec: no id feature {options.negatives!r} for negatives")
        if width % options.heads:
            raise ConfigError(f"SASRec: {options.heads} heads do not divide rows of {width}")
        self.negatives, self.max_length = options.negatives, options.max_length
        self.negatives_loss = options.negatives_loss
        layers = LayerFactory(seed)
        self.places = layers.weight(options.max_length, width)
        with torch.no_grad():
            self.places.mul_(_SCALE_OF_PLACES)
        self.start = layers.weight(1, width)
        self.scale = width**0.5
        self.dropout = layers.dropout(options.dropout)
        self.blocks = nn.ModuleList(
            _Block(layers, width, options.heads, options.dropout) for _ in range(options.blocks)
        )
        self.norm = nn.LayerNorm(width)

    @classmethod
    def roles(
        cls, tables: Mapping[str, Sequence[str]], histories: Sequence[str], negatives: Mapping[str, str]
    ) -> dict[str, Any]:
        """Find out from a schema which features are what."""
        found = super().roles(tables, histories, negatives)
        of_target = [name for name, of in negatives.items() if of in found["target"]]
        return {**found, "negatives": of_target[0] if of_target else ""}

    def forward(self, batch: Batch) -> Tensor:
        """Logits of the targets, one per sample."""
        rows, _ = self.rows(batch)
        return self._logits(rows, self._state(rows[self.history[0]], batch.index))

    def logits_and_losses(self, batch: Batch, losses: Losses = per_sample_loss) -> tuple[Tensor, Tensor]:
        """Logits of the targets, and the loss of each sample with its negatives."""
        rows, _ = self.rows(batch)
        state = self._state(rows[self.history[0]], batch.index)
        logits = self._logits(rows, state)
        per_sample = labelled_losses("SASRec", logits, batch, losses)
        if self.negatives:
            others = rows[self.negatives]
            owner = owners(others.lengths().to(torch.int64))
            scores = (state.index_select(0, owner) * others.values()).sum(1)
            loss = self.negatives_loss
            scale = scale_of(losses, batch)
            per_sample = losses_with_drawn(loss, per_sample, logits, scores, others, batch, scale)
        return logits, per_sample

    def _logits(self, rows: Mapping[str, JaggedTensor], state: Tensor) -> Tensor:
        return (state * summed_rows(rows[self.target[0]])).sum(1)

    def _state(self, history: JaggedTensor, index: Tensor) -> Tensor:
        """The state after the newest event, samples x width."""
        lengths = history.lengths().to(torch.int64).clamp(max=self.max_length)
        longest = max(1, int(lengths.max())) if len(lengths) else 1
        events = history.to_padded_dense(longest, keep="last")
        from_newest = lengths.unsqueeze(1) - 1 - torch.arange(longest, device=lengths.device)
        states = self.dropout(events * self.scale + self.places[from_newest.clamp(min=0)], index)
        for block in self.blocks:
            states = block(states, index)  # what follows a history's end is not looked at
        last = states[torch.arange(len(lengths), device=lengths.device), (lengths - 1).clamp(min=0)]
        states = torch.where((lengths > 0).unsqueeze(1), last, self.start)
        normed: Tensor = self.norm(states)
        return normed


class _Block(nn.Module):
    """Attention and a layer for each place, each normalised before and added to its input after."""

    def __init__(self, layers: LayerFactory, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.joined = (layers.linear(width, width) for _ in range(4))
        self.first, self.second = layers.linear(width, width), layers.linear(width, width)
        self.drop_attention, self.drop_layers = layers.dropout(dropout), layers.dropout(dropout)

    def forward(self, states: Tensor, index: Tensor) -> Tensor:
        """From samples x places x width to the same."""
        normed = self.before_attention(states)
        query, key, value = (self._by_head(one(normed)) for one in (self.query, self.key, self.value))
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        joined = self.joined(seen.transpose(1, 2).reshape(states.shape))
        states = states + self.drop_attention(joined, index)
        deeper: Tensor = self.second(torch.relu(self.first(self.before_layers(states))))
        out: Tensor = states + self.drop_layers(deeper, index)
        return out

    def _by_head(self, vectors: Tensor) -> Tensor:
        samples, places, _ = vectors.shape
        return vectors.view(samples, places, self.heads, self.width // self.heads).transpose(1, 2)
