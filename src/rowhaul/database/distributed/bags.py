"""`DatabaseBags`: a distributed database in a model, as a layer whose backward pass pushes gradients.

What `prefetch` was asked for goes in as its ticket, and out come the vectors of all its tables side by side,
samples x dims, as a collection of embedding bags would give them. The backward pass sends the gradients on
their way; `step` is one optimizer step of the rows of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rowhaul.database.distributed.database import DistributedEmbeddingDatabase, DistributedTicket


class DatabaseBags(nn.Module):
    """Vectors of several features side by side, from a `DistributedEmbeddingDatabase`.

    All ranks run forward, backward and `step` together, in the same order, as they would pull, push and
    update. Gradients of all ranks are added up: a loss should be a sum over the rank's samples, divided by
    the number of samples of all ranks.

    Args:
        database: stays open as long as the module is used; its rows are not parameters of the module.

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
        # Rows are no tensors that autograd knows; this one stands for them all, and gets no gradient.
        self._rows = torch.zeros(0, requires_grad=True)

    def forward(self, ticket: DistributedTicket) -> Tensor:
        """The vectors of the ticket's tables, in the order they were asked for: samples x sum of dims."""
        vectors: Tensor = _PullAndPush.apply(self._rows, self.database, ticket)  # type: ignore[no-untyped-call]
        return vectors

    def step(self, lr: float | None = None) -> int:
        """One optimizer step with what the backward passes of all ranks pushed; the rows moved here."""
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
