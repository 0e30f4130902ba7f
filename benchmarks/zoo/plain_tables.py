"""PyTorch's tables in place of a collection: what one would write without Rowhaul. Ids are row numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rowhaul.nn import EmbeddingBagConfig, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor

RANGE = 0.01  # of first values
OTHER_SEED = 1000  # models draw their weights by the seed itself: rows would be the same numbers


class PlainTables(nn.Module):
    """`torch.nn.Embedding` tables with sparse gradients, in place of an `EmbeddingCollection`."""

    def __init__(self, configs: Sequence[EmbeddingConfig], sizes: dict[str, int], seed: int) -> None:
        super().__init__()
        self.configs = list(configs)
        generator = torch.Generator().manual_seed(seed + OTHER_SEED)
        self.tables = nn.ModuleDict()
        for one in configs:
            weight = torch.empty(sizes[one.name], one.embedding_dim)
            self.tables[one.name] = self.made(weight.uniform_(-RANGE, RANGE, generator=generator))

    def made(self, weight: torch.Tensor) -> nn.Module:
        """A table with these values."""
        return nn.Embedding(*weight.shape, sparse=True, _weight=weight)

    def table_configs(self) -> list[EmbeddingConfig]:
        """The tables, in order."""
        return self.configs

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Tables and the features that read them."""
        return [(one.name, feature) for one in self.configs for feature in one.feature_names]

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor] | KeyedTensor:
        """The rows of every feature."""
        parts = {name: (table, ids[name]) for table, name in self.pairs}
        return {
            name: part.with_values(self.tables[table](part.values())) for name, (table, part) in parts.items()
        }


class PlainBags(PlainTables):
    """`torch.nn.EmbeddingBag` tables, in place of an `EmbeddingBagCollection`."""

    def made(self, weight: torch.Tensor) -> nn.Module:
        """A table with these values."""
        return nn.EmbeddingBag(
            *weight.shape, mode="sum", sparse=True, include_last_offset=True, _weight=weight
        )

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """The tables, in order."""
        return self.configs

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor] | KeyedTensor:
        """The pooled rows of every feature."""
        pooled = [self.tables[table](ids[name].values(), ids[name].offsets()) for table, name in self.pairs]
        names = [name for _, name in self.pairs]
        return KeyedTensor(names, [one.shape[1] for one in pooled], torch.cat(pooled, dim=1))


def plain_tables(configs: Sequence[EmbeddingConfig], sizes: dict[str, int], seed: int) -> PlainTables:
    """Tables as a model asks for them: pooled or not."""
    kind = PlainBags if isinstance(configs[0], EmbeddingBagConfig) else PlainTables
    return kind(configs, sizes, seed)


def use_plain_operations(model: nn.Module) -> None:
    """Take PyTorch's own operations alone: no kernel of this library."""
    for one in model.modules():
        if hasattr(one, "fuses"):
            one.fuses = False
