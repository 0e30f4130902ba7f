"""What models of several labels share: inputs that all tasks read, and a tower for each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from rowhaul.nn.layers import LayerFactory, has_kernel
from rowhaul.nn.mixtures import mixtures
from rowhaul.nn.models.base import RecommendationModel


class Towers(nn.Module):
    """An MLP and a linear layer to one logit for each task."""

    def __init__(
        self, layers: LayerFactory, num_tasks: int, inputs: int, hidden: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        self.deep = nn.ModuleList(layers.mlp(inputs, hidden, dropout) for _ in range(num_tasks))
        self.out = nn.ModuleList(layers.linear((inputs, *hidden)[-1], 1) for _ in range(num_tasks))

    def forward(self, inputs: Sequence[Tensor], index: Tensor) -> Tensor:
        """Logits, samples x tasks, from the inputs of each task."""
        pairs = zip(self.deep, self.out, inputs, strict=True)
        return torch.cat([out(deep(x, index)) for deep, out, x in pairs], dim=1)


class Experts(nn.Module):
    """MLPs over one input."""

    def __init__(
        self, layers: LayerFactory, count: int, inputs: int, hidden: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(layers.mlp(inputs, hidden, dropout) for _ in range(count))

    def forward(self, inputs: Tensor, index: Tensor) -> list[Tensor]:
        """Samples x outputs of each."""
        return [mlp(inputs, index) for mlp in self.mlps]


class Mixtures(nn.Module):
    """Σ_e softmax(g)_e expert_e, for the logits g of several gates.

    ``fuses``: a kernel makes all sums at once, where it can.

    Args:
        members: of each gate, the numbers of the experts that it mixes.
    """

    fuses = True

    def __init__(self, members: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.members = members

    def forward(self, gates: Sequence[Tensor], experts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Samples x outputs of each gate."""
        weights = [torch.softmax(one, dim=1) for one in gates]
        if self.fuses and has_kernel(*weights, *experts):
            return mixtures(self.members, torch.cat(weights, dim=1), experts)
        mixed = [torch.stack([experts[number] for number in some], dim=1) for some in self.members]
        return [(one.unsqueeze(2) * some).sum(1) for one, some in zip(weights, mixed, strict=True)]


class MultiTaskModel(RecommendationModel):
    """Base of models that predict several labels; of one label their logits are one per sample."""

    most_tasks: ClassVar[int] = sys.maxsize

    def __init__(self, collection: nn.Module, num_dense: int, num_tasks: int) -> None:
        super().__init__(collection, num_dense)
        self.num_tasks = num_tasks
        self.num_inputs = sum(self.widths) + num_dense

    def logits(self, pooled: Tensor, dense: Tensor, index: Tensor) -> Tensor:
        """Logits, samples x tasks; one per sample where there is one task."""
        logits = self.task_logits(torch.cat([pooled, dense], dim=1), index)
        return logits if self.num_tasks > 1 else logits.squeeze(1)

    def task_logits(self, inputs: Tensor, index: Tensor) -> Tensor:
        """Logits, samples x tasks, from embeddings and dense columns."""
        raise NotImplementedError
