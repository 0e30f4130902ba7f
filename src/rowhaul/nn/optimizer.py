"""`RowOptimizer`: a collection's row steps as a ``torch.optim.Optimizer``, so that schedulers work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rowhaul.errors import ConfigError
from rowhaul.nn.collection import TableCollection


class RowOptimizer(torch.optim.Optimizer):
    """Steps the embedding rows that backward touched; stands beside the dense optimizer.

    The update itself is the collection's own (``EmbeddingBagCollection(optimizer=...)``). There is
    one parameter group a collection, whose ``lr`` any ``torch.optim.lr_scheduler`` may change and
    whose ``number`` counts the steps taken, on from those of the collection's own state.

    Example:
        >>> rows, dense = RowOptimizer(model), torch.optim.Adam(model.parameters())
        >>> batch.loss(per_sample).backward()
        >>> rows.step(); dense.step(); dense.zero_grad()
    """

    def __init__(self, module: nn.Module) -> None:
        self.collections = [one for one in module.modules() if isinstance(one, TableCollection)]
        if not self.collections:
            raise ConfigError(
                f"{type(module).__name__} has no EmbeddingBagCollection and no EmbeddingCollection, so no "
                "rows to train"
            )
        groups = [
            {"params": [one.anchor], "lr": one.optimizer.lr, "number": one.steps} for one in self.collections
        ]
        super().__init__(groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every row touched since the last call once, by the sum of its gradients."""
        loss = closure() if closure is not None else None
        for collection, group in zip(self.collections, self.param_groups, strict=True):
            if collection.loaded_steps is not None:
                group["number"] = collection.loaded_steps
            group["number"] += 1
            collection.apply_gradients(float(group["lr"]), group["number"])
        return loss

    def count_from(self, number: int) -> None:
        """Set how many steps rows have taken."""
        for collection, group in zip(self.collections, self.param_groups, strict=True):
            group["number"] = collection.steps = number
            collection.loaded_steps = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on as the optimizer that was saved; it counts its steps on, whatever the collections say."""
        super().load_state_dict(state_dict)
        for collection in self.collections:
            collection.loaded_steps = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used."""
        for collection in self.collections:
            collection.drop_gradients()
