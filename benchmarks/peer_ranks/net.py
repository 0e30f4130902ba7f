"""What the peers train, in plain PyTorch: DLRM's dense part, and a run's work as their readers have it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Dense(nn.Module):
    """Bottom layers, dot products, top layers: as Rowhaul's DLRM, over vectors that are pooled elsewhere."""

    def __init__(
        self, num_dense: int, num_features: int, dim: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.num_features, self.dim = num_features, dim
        vectors = num_features + 1
        self.pairs: torch.Tensor
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.bottom = _layers([num_dense, *bottom, dim])
        self.top = _layers([dim + self.pairs.shape[1], *top])
        self.out = nn.Linear(top[-1], 1)

    def forward(self, pooled: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Logits of samples: ``pooled`` has the vectors of a sample side by side."""
        first = self.bottom(dense)
        vectors = torch.cat([first.unsqueeze(1), pooled.view(-1, self.num_features, self.dim)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        dots = products[:, self.pairs[0], self.pairs[1]]
        return self.out(self.top(torch.cat([first, dots], dim=1))).squeeze(1)


def _layers(sizes: Sequence[int]) -> nn.Sequential:
    made: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        made += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*made)


class Work:
    """Global batches with ids that were numbered beforehand, which these peers need; Rowhaul does not."""

    def __init__(self, folder: Path) -> None:
        self.facts = json.loads((folder / "work.json").read_text())
        arrays = np.load(folder / "work.npz")
        self.ids, self.dense, self.labels = arrays["ids"], arrays["dense"], arrays["labels"]
        self.num_rows: list[int] = self.facts["num_rows"]  # by table

    def __len__(self) -> int:
        return len(self.labels) // self.facts["batch"]

    def part(
        self, step: int, rank: int, ranks: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids and lengths by feature, dense columns and labels of one rank's equal part of a batch."""
        batch = self.facts["batch"]
        mine = slice(step * batch + rank * batch // ranks, step * batch + (rank + 1) * batch // ranks)
        ids = self.ids[:, mine]
        there = ids >= 0  # an absent id makes an empty bag
        return (
            torch.from_numpy(ids[there]),
            torch.from_numpy(there.reshape(-1).astype(np.int32)),
            torch.from_numpy(self.dense[mine]),
            torch.from_numpy(self.labels[mine]),
        )


class Pace:
    """Writes the speed to a file every so often, as Rowhaul's log does."""

    def __init__(self, path: Path | None, batch: int, every: int) -> None:
        self._path, self._batch, self._every = path, batch, every
        self._began = time.perf_counter()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def step(self, done: int, loss: torch.Tensor) -> None:
        """After a step; ``done`` are the steps so far."""
        if self._path is None or done % self._every:
            return
        now = time.perf_counter()
        speed = self._every * self._batch / (now - self._began)
        line = {"kind": "train", "step": done, "samples_per_second": speed, "loss": float(loss.detach())}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._began = now


def place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
