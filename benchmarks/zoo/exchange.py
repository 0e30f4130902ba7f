"""The same samples for a peer in another process: files it reads, and questions it answers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from zoo.environments import Environment
from zoo.sides import Numbers

FOLDER = Path(__file__).resolve().parent


class SplitFiles:
    """Writes batches as numbered, padded columns, so that a peer need not number anything itself.

    A column of one id for each sample is flat; lists are as wide as the longest of all. Numbers begin at 1:
    0 stands for padding.
    """

    def __init__(self, schema: Schema, numbers: Numbers, every: Sequence[Samples]) -> None:
        self._numbers, self._label = numbers, schema.label.name
        self.features: dict[str, tuple[int, int]] = {}  # rows of the table; ids of the longest list, or 0
        for place, column in enumerate(schema.ids):
            longest = max(int(one.lengths[place].max()) for one in every)
            is_flat = all((one.lengths[place] == 1).all() for one in every)
            self.features[column.name] = (numbers.sizes[column.table], 0 if is_flat else longest)

    def write(self, path: Path, batches: Sequence[Samples]) -> None:
        """Write batches, one after the other."""
        parts = [self._columns(samples) for samples in batches]
        columns = {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}
        np.savez(path, **columns, batch_ends=np.cumsum([len(one) for one in batches]))

    def _columns(self, samples: Samples) -> dict[str, npt.NDArray[Any]]:
        columns: dict[str, npt.NDArray[Any]] = {self._label: samples.labels}
        numbered = self._numbers.of_features(samples)
        for name, ids, lengths in zip(samples.features, numbered, samples.lengths, strict=True):
            width = self.features[name][1]
            if not width:
                columns[name] = (ids + 1).astype(np.int32)
                continue
            columns[name] = np.zeros((len(samples), width), np.int32)
            columns[name][np.arange(width) < lengths[:, np.newaxis]] = ids + 1
        return columns


class PeerProcess:
    """A peer's model in its own environment, asked to train by and by."""

    def __init__(self, environment: Environment, script: str, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        (folder / "settings.json").write_text(json.dumps(settings))
        self._process = subprocess.Popen(
            [str(environment.python()), str(FOLDER / script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("w"),
            text=True,
            cwd=folder,  # RecBole writes a folder of logs where it is
        )

    def train(self, first: int, last: int) -> float:
        """Train batches; processor seconds that it took."""
        return float(self._ask(train=(first, last))["seconds"])

    def scores(self) -> npt.NDArray[np.float32]:
        """Scores of the test samples."""
        path = self._folder / "scores.npy"
        self._ask(scores=str(path))
        found: npt.NDArray[np.float32] = np.load(path)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"a peer ended: {(self._folder / 'log').read_text()[-2000:]}")
        found: dict[str, Any] = json.loads(answer)
        return found
