"""`DatabaseBags`: a distributed database as a layer of a model, whose backward pass pushes gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rowhaul.database.distributed.database import DistributedEmbeddingDatabase, DistributedTicket


class DatabaseBags(nn.Module):
    """Vectors of several features side by side, from a `DistributedEmbeddingDatabase`.

    The forward pass takes a ticket of `prefetch` and pulls, the backward pass pushes, and `step` updates the
    rows of all ranks: all ranks run them together, in the same order. Gradients of all ranks are summed, so
    divide a sum over the rank's samples by the number of samples of all ranks.

    Args:
        database: must stay open while the module is used; its rows are not parameters of the module.

    Example:
        >>> bags = DatabaseBags(db)
        >>> ticket = db.prefetch({"users": users, "items": items})
        >>> loss = top(bags(ticket)).square().sum() / global_batch
        >>> loss.backward()
        >>> bags.step()
    """

    def __init__(self, database: DistributedEmbeddingDatabase) -> None:
        super().__init__()
        self.database = database
        # Autograd needs an input that requires a gradient; this one stands for all rows and gets none.
        self._rows = torch.zeros(0, requires_grad=True)

    def forward(self, ticket: DistributedTicket) -> Tensor:
        """Return the vectors of the ticket's tables, in their order: samples x sum of dims."""
        vectors: Tensor = _PullAndPush.apply(self._rows, self.database, ticket)  # type: ignore[no-untyped-call]  # torch's apply has no types
        return vectors

    def step(self, lr: float | None = None) -> int:
        """Take one optimizer step with what all ranks pushed; return the rows moved on this rank."""
        return self.database.update(lr)


class _PullAndPush(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, database: DistributedEmbeddingDatabase, ticket: Any) -> Tensor:
        ctx.database, ctx.ticket = database, ticket
        return database.pull_joined(ticket)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.database.push_joined(ctx.ticket, gradients[0])
        return None, None, None
