"""The peer of `serving.py`: what one writes first. FastAPI, a dictionary of ids, `torch.nn.EmbeddingBag`.

The model is the run's own: its rows are put into one `EmbeddingBag` a feature, its dense part is called as it
is.
"""

from __future__ import annotations

import os

import torch
from fastapi import FastAPI
from pydantic import BaseModel
from torch import nn

from rowhaul.export.serving.dense import DensePart
from rowhaul.train import load_trained

RUN = "ROWHAUL_PEER_RUN"


class Request(BaseModel):
    shared: dict[str, float | int | None]
    candidates: dict[str, list[float | int | None]]


class PlainModel:
    """The run's model with its rows in bags."""

    def __init__(self, run: str) -> None:
        torch.set_num_threads(1)
        trainer = load_trained(run)
        self.schema = trainer.schema
        self.dense = DensePart(trainer.model)
        self.index: dict[str, dict[int, int]] = {}
        self.bags: dict[str, nn.EmbeddingBag] = {}
        for config in trainer.collection.embedding_bag_configs():
            blocks = list(trainer.collection.rows(config.name))
            keys = [key for some, _ in blocks for key in some.tolist()]
            values = [torch.from_numpy(records[:, : config.embedding_dim].copy()) for _, records in blocks]
            weight = torch.cat([torch.zeros(1, config.embedding_dim), *values])  # row 0: missing or unseen
            (name,) = config.feature_names
            self.index[name] = {key: row for row, key in enumerate(keys, start=1)}
            self.bags[name] = nn.EmbeddingBag.from_pretrained(weight, mode="sum")

    @torch.inference_mode()
    def score(self, request: Request) -> list[float]:
        count = len(next(iter(request.candidates.values())))

        def column(name: str) -> list[float | int | None]:
            return [request.shared[name]] * count if name in request.shared else request.candidates[name]

        pooled = []
        for name, bag in self.bags.items():
            index = self.index[name]
            rows = torch.tensor([index.get(key, 0) for key in column(name)])
            pooled.append(bag(rows.unsqueeze(1)))
        numbers = torch.tensor([[value or 0.0 for value in column(one.name)] for one in self.schema.dense])
        logits = self.dense(torch.cat(pooled, dim=1), torch.log1p(numbers.T.clamp(min=0)))
        return torch.sigmoid(logits).tolist()


app = FastAPI()
model = PlainModel(os.environ[RUN]) if RUN in os.environ else None


@app.get("/healthz")
def healthz() -> dict[str, str]:
    return {"status": "ok"}


@app.post("/score")
def score(request: Request) -> dict[str, list[float]]:
    assert model is not None
    return {"scores": model.score(request)}
