"""A DLRM as a graph in parts, for `rowhaul.serve.shared_dots`.

What multiplies vectors is left to the server, which knows what all candidates of a request share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowhaul.nn.models.dlrm import DLRM


class DotsParts(nn.Module):
    """The layers of a DLRM before its dot products, and those after them, in evaluation."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(
        self,
        interactions: Tensor,
        columns: Tensor,
        shared: Tensor,
        shared_columns: Tensor,
        numbers: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Logits of some samples and, of a model with dense columns, the vectors of others.

        Args:
            interactions: inputs of the first layer after the dot products that samples have for themselves.
            columns: which inputs those are.
            shared: inputs that all samples share, in one row.
            shared_columns: which inputs those are.
            numbers: dense columns of other samples.
        """
        first, *others = self._layers()
        weight = first.weight.t()
        bias = torch.addmm(first.bias, shared, weight.index_select(0, shared_columns))
        x = torch.addmm(bias, interactions, weight.index_select(0, columns))
        for layer in others:
            x = layer(torch.relu(x))
        if numbers is None or self.model.bottom is None:
            return (x.squeeze(1),)
        no_index = torch.zeros(0, dtype=torch.int64)  # only dropout reads it
        return x.squeeze(1), self.model.bottom(numbers, no_index)

    def _layers(self) -> tuple[nn.Linear, ...]:
        return (*cast(Iterable[nn.Linear], self.model.top.linears), self.model.out)

    def inputs(self) -> dict[str, tuple[Tensor, dict[int, Any]]]:
        """Return examples of the inputs, and which of their sizes differ between requests."""
        first, dtype = self._layers()[0], self.model.out.weight.dtype
        samples, own, common, others = (
            torch.export.Dim(name, min=1) for name in ("samples", "own", "common", "others")
        )
        given: dict[str, tuple[Tensor, dict[int, Any]]] = {
            "interactions": (torch.zeros(3, first.in_features, dtype=dtype), {0: samples, 1: own}),
            "columns": (torch.arange(first.in_features), {0: own}),
            "shared": (torch.zeros(1, 2, dtype=dtype), {1: common}),
            "shared_columns": (torch.zeros(2, dtype=torch.int64), {0: common}),
        }
        if self.model.num_dense:
            given["numbers"] = (torch.zeros(4, self.model.num_dense, dtype=dtype), {0: others})
        return given

    @property
    def outputs(self) -> list[str]:
        """The names of what `forward` returns."""
        return ["logits", "vector"] if self.model.num_dense else ["logits"]
