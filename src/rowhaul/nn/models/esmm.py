"""ESMM (Ma et al., 2018): conversions learned from all samples, as clicks times conversions after a click."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from rowhaul.nn.layers import LayerFactory
from rowhaul.nn.models.base import MLPOptions
from rowhaul.nn.models.multi_task import MultiTaskModel, Towers


class ESMMOptions(MLPOptions):
    """Options of `ESMM`."""


class ESMM(MultiTaskModel):
    """p(click) = sigmoid(a), p(click and conversion) = sigmoid(a) sigmoid(b); a, b = MLPs of [rows, dense].

    The second logit is that of the product: -log(e^-a + e^-b + e^-(a+b)). Without a click there was no
    conversion, so both labels are known for all samples, and the second score is of all samples, too.
    """

    Options: ClassVar[type[MLPOptions]] = ESMMOptions
    least_tasks = most_tasks = 2
    learns_from_all = True

    def __init__(
        self,
        collection: nn.Module,
        num_dense: int,
        options: MLPOptions = ESMMOptions(),
        seed: int = 0,
        num_tasks: int = 2,
    ) -> None:
        super().__init__(collection, num_dense, num_tasks)
        layers = LayerFactory(seed)
        self.towers = Towers(layers, num_tasks, self.num_inputs, options.hidden, options.dropout)

    def task_logits(self, inputs: Tensor, index: Tensor) -> Tensor:
        """Logits of a click, and of a click and a conversion."""
        click, after = self.towers([inputs, inputs], index).unbind(1)
        both = -torch.logsumexp(torch.stack([-click, -after, -click - after], dim=1), dim=1)
        return torch.stack([click, both], dim=1)

    def targets(self, labels: Tensor) -> Tensor:
        """Clicks as they are; no conversion where there was no click."""
        click, conversion = labels.unbind(1)
        return torch.stack([click, torch.where(click == 0, torch.zeros_like(click), conversion)], dim=1)
