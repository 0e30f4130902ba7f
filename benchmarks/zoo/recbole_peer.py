"""RecBole's SASRec, trained by its own `Trainer._train_epoch`. Runs in an environment of its own."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
from peer_loop import Columns, Task, serve
from recbole.config import Config
from recbole.data.interaction import Interaction
from recbole.model.sequential_recommender import SASRec
from recbole.trainer import Trainer


class CopiedProduct(torch.autograd.Function):
    """`torch.matmul` of batches, transposed ones copied first.

    PyTorch on ARM multiplies transposed batches 20 to 100 times as slowly as their copies: without this,
    attention would be all that is measured there.
    """

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        return matmul(left.contiguous(), right.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_left = matmul(gradient, right.transpose(-1, -2).contiguous())
        return of_left, matmul(left.transpose(-1, -2).contiguous(), gradient)


matmul = torch.matmul


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply, by copies where there are batches on both sides."""
    if left.dim() == right.dim() == 4:
        return CopiedProduct.apply(left, right)
    return matmul(left, right)


class RecBole:
    """Its SASRec. Of a data set the model only asks how many items there are."""

    def __init__(self, task: Task) -> None:
        settings, self._folder = task.settings, tempfile.TemporaryDirectory()
        config = Config(
            model="SASRec",
            dataset="movielens",
            config_dict={
                "use_gpu": False,
                "show_progress": False,
                "checkpoint_dir": self._folder.name,
                "learning_rate": settings["lr"],
                "MAX_ITEM_LIST_LENGTH": settings["features"]["history"][1],
                "hidden_size": settings["dim"],
                "train_neg_sample_args": None,  # they are in the batches
                **settings["options"],
            },
        )
        torch.matmul = product
        num_items = settings["features"]["movie"][0] + 1
        self._model = SASRec(config, SimpleNamespace(num=lambda field: num_items))
        self._trainer = Trainer(config, self._model)

    def prepared(self, columns: Columns) -> Any:
        """A batch as its data loader makes it: histories padded to the longest of all."""
        model, history = self._model, columns["history"].long()
        fields = {
            model.ITEM_SEQ: history,
            model.ITEM_SEQ_LEN: (history > 0).sum(dim=1),
            model.POS_ITEM_ID: columns["movie"].long(),
        }
        if "others" in columns:
            fields[model.NEG_ITEM_ID] = columns["others"].long()
        return Interaction(fields)

    def train(self, batches: list[Any]) -> None:
        """Train with its own loop."""
        self._trainer._train_epoch(batches, 0)

    def scores(self, columns: Columns) -> torch.Tensor:
        """Scores of all items, samples x items; without the one that stands for padding."""
        self._model.eval()
        return self._model.full_sort_predict(self.prepared(columns))[:, 1:]


if __name__ == "__main__":
    serve(RecBole)
