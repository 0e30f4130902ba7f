"""What a peer does in its own environment: train the batches it is told to, and write scores.

Asked by a line of JSON, it answers by one. Needs NumPy and PyTorch alone, since it runs beside the libraries
that Rowhaul is compared with, in their environments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

Columns = dict[str, torch.Tensor]


class Peer(Protocol):
    """A library's model and trainer."""

    def train(self, batches: list[Any]) -> None:
        """Train on batches, in order."""

    def prepared(self, columns: Columns) -> Any:
        """Make a batch as the library takes it: what a data loader does, before the clock starts."""

    def scores(self, columns: Columns) -> torch.Tensor:
        """Score samples."""


@dataclass(frozen=True)
class Task:
    """What is asked for, and where its samples are."""

    settings: dict[str, Any]
    train: Columns
    test: Columns
    batch_ends: list[int]

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Read what `zoo.exchange` wrote."""
        settings = json.loads((folder / "settings.json").read_text())
        train, test = (
            {name: torch.from_numpy(values) for name, values in np.load(folder / f"{part}.npz").items()}
            for part in ("train", "test")
        )
        ends = train.pop("batch_ends").tolist()
        test.pop("batch_ends")
        return cls(settings, train, test, ends)

    def batch(self, number: int) -> Columns:
        """The columns of a batch."""
        begin = self.batch_ends[number - 1] if number else 0
        return {name: values[begin : self.batch_ends[number]] for name, values in self.train.items()}


def serve(make: Callable[[Task], Peer]) -> None:
    """Answer until standard input ends; the only argument is the folder of the task."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    task = Task.read(Path(sys.argv[1]))
    torch.manual_seed(task.settings["seed"])
    np.random.seed(task.settings["seed"])
    peer = make(task)
    for line in sys.stdin:
        asked = json.loads(line)
        if "scores" in asked:
            parts = zip(*(values.split(1024) for values in task.test.values()), strict=True)
            with torch.no_grad():
                found = [peer.scores(dict(zip(task.test, part, strict=True))) for part in parts]
            np.save(asked["scores"], torch.cat(found).numpy())
            answer: dict[str, Any] = {}
        else:
            batches = [peer.prepared(task.batch(number)) for number in range(*asked["train"])]
            began = time.process_time()
            peer.train(batches)
            answer = {"seconds": time.process_time() - began}
        print(json.dumps(answer), file=answers, flush=True)
