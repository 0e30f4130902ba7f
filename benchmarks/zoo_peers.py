"""DIN, DCN-v2 and SASRec beside the models of the same name in FuxiCTR and RecBole, on MovieLens-1M.

Theirs are their own classes, trained by their own loops (FuxiCTR's `train_epoch`, RecBole's
`Trainer._train_epoch`), in processes and environments of their own, ``.venv-fuxictr`` and ``.venv-recbole``,
made on the first run. All train on the same batches in the same order, by turns, and are tested on the same
samples, the last tenth in time; their ids are numbered and padded before anything is timed. Sizes are ours:
rows of 16 (SASRec: 32), hidden layers (256, 128), attention (64, 32), 3 cross layers, 2 blocks of 1 head.
Qualities are computed here, from scores: AUC, or NDCG@10 of the next movie among all that are not in the
history.

    python benchmarks/zoo_peers.py
    python benchmarks/zoo_peers.py --models sasrec --seeds 1 --samples 100_000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from datasets import movielens_1m
from models import BATCH_SIZE, HISTORY, next_item
from report import console, print_machine, print_table
from rowhaul.data.preparing import prepare
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.nn import (
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from rowhaul.optim import Adagrad, Adam, RowOptimizerRule
from zoo.environments import FUXICTR, RECBOLE, Environment
from zoo.exchange import PeerProcess, SplitFiles
from zoo.sides import Numbers, Side

TURN = 20  # batches that one trains before the next does
RANKED, EVENTS = 10_000, 20  # test samples for which all movies are ranked; events that SASRec reads


def tables(configs: Sequence[EmbeddingConfig], rule: RowOptimizerRule, seed: int) -> nn.Module:
    """A collection as a model asks for it; a pooled history is a mean, as FuxiCTR's."""
    if not isinstance(configs[0], EmbeddingBagConfig):
        return EmbeddingCollection(list(configs), optimizer=rule, seed=seed)
    means = [
        replace(one, pooling=PoolingType.MEAN) if "history" in one.feature_names else one for one in configs
    ]
    return EmbeddingBagCollection(means, optimizer=rule, seed=seed)


class Contender(Protocol):
    """Trains batches of a split that it knows, and scores its test samples."""

    def train(self, first: int, last: int) -> float:
        """Train batches; processor seconds that it took."""

    def scores(self) -> npt.NDArray[np.float32]:
        """Scores of the test samples; of models that rank, samples x movies."""

    def close(self) -> None:
        """Free what it holds."""


class Ours:
    """A model of this library."""

    def __init__(self, split: Split, *, by_adam: bool = False, **options: Any) -> None:
        self._split, seed, size = split, split.seed, split.size
        rule = Adam(lr=size.lr) if by_adam else Adagrad(lr=0.05, eps=1e-8)
        self._side = Side(
            split.model,
            split.schema,
            lambda configs: tables(configs, rule, seed),
            seed,
            size.dim,
            size.lr,
            options=options,
        )

    def train(self, first: int, last: int) -> float:
        """Train batches."""
        before = self._side.seconds
        for samples in self._split.train[first:last]:
            self._side.train(Batch.from_samples(samples))
        return self._side.seconds - before

    def scores(self) -> npt.NDArray[np.float32]:
        """Score samples, or all movies for each."""
        batches = [Batch.from_samples(one) for one in self._split.test]
        if not self._split.ranks:
            return self._side.scores(batches)
        model = self._side.model.eval()
        movies = self._split.numbers.keys["movie"]
        lengths = np.zeros((len(self._split.schema.features), len(movies)), np.int32)
        lengths[self._split.schema.features.index("movie")] = 1
        none, places = np.zeros((len(movies), 0), np.float32), np.arange(len(movies))
        every = Batch.from_samples(Samples(self._split.schema.features, movies, lengths, none, None, places))
        with torch.no_grad():
            items = model.rows(every)[0]["movie"].values()
            states = [model._state(model.rows(one)[0]["history"], one.index) for one in batches]
        return (torch.cat(states) @ items.T).numpy()

    def close(self) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True)
class Size:
    """What all sides have in common."""

    dim: int  # of rows
    batch: int
    lr: float  # of Adam


BY_CLICKS, BY_RANKS = Size(16, BATCH_SIZE, 0.001), Size(32, 256, 0.003)


@dataclass(frozen=True)
class Split:
    """What one seed trains on, in which order, and is tested on."""

    model: str
    schema: Schema
    seed: int
    size: Size
    ranks: bool
    train: list[Samples]
    test: list[Samples]
    numbers: Numbers

    @classmethod
    def read(cls, model: str, folder: Path, seed: int, num_samples: int, **negatives: Any) -> Split:
        """Read MovieLens-1M, prepared, in the order that a seed makes."""
        schema, ranks = Schema.read(folder / "schema.yaml"), model == "sasrec"
        if ranks:
            movie, history, others = next_item(schema).ids
            history, others = replace(history, max_length=EVENTS), replace(others, **negatives)
            schema = Schema(schema.label, (), (movie, history, others))
        size = BY_RANKS if ranks else BY_CLICKS
        stream = SampleStream(
            folder,
            schema,
            size.batch,
            epochs=1 + num_samples // 900_000,  # so many are not held out
            shuffle_rows=1 << 20,
            seed=seed,
            limit=num_samples,
        )
        train, test = list(stream), list(SampleStream(folder / "test", schema, BATCH_SIZE))
        if ranks:
            train, test = [with_history(one) for one in train], [with_history(one) for one in test]
            step = max(1, sum(map(len, test)) // RANKED)
            test = [one.take(np.arange(0, len(one), step)) for one in test]
        return cls(model, schema, seed, size, ranks, train, test, Numbers(schema, [*train, *test]))

    def quality(self, scores: npt.NDArray[np.float32]) -> float:
        """AUC, or NDCG@10 of the true movie among all but those in the history."""
        if not self.ranks:
            return float(roc_auc_score(np.concatenate([one.labels for one in self.test]), scores))
        gains, first = [], 0
        for samples in self.test:
            numbered = dict(zip(samples.features, self.numbers.of_features(samples), strict=True))
            some, rows = scores[first : first + len(samples)].copy(), np.arange(len(samples))
            true = some[rows, numbered["movie"]]
            owner = np.repeat(rows, samples.lengths[samples.features.index("history")])
            some[owner, numbered["history"]] = -np.inf
            some[rows, numbered["movie"]] = -np.inf
            ranks = (some >= true[:, np.newaxis]).sum(axis=1)
            gains.append(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0))
            first += len(samples)
        return float(np.concatenate(gains).mean())


def with_history(samples: Samples) -> Samples:
    """Samples with a history, all to be found: which movie came next, however many stars it got."""
    some = samples.take(np.flatnonzero(samples.lengths[samples.features.index("history")]))
    return replace(some, labels=np.ones(len(some), np.float32))


@dataclass(frozen=True)
class Library:
    """A peer: its environment, the script that runs there, and settings of its model."""

    environment: Environment
    script: str
    options: dict[str, Any] = field(default_factory=dict)

    def start(self, split: Split, folder: Path) -> PeerProcess:
        """Write the split, and start the process."""
        folder.mkdir()
        files = SplitFiles(split.schema, split.numbers, [*split.train, *split.test])
        files.write(folder / "train.npz", split.train)
        files.write(folder / "test.npz", split.test)
        settings = {"model": split.model, "seed": split.seed, "dim": split.size.dim, "lr": split.size.lr}
        return PeerProcess(
            self.environment,
            self.script,
            folder,
            {**settings, "features": files.features, "options": self.options},
        )


FUXI = Library(FUXICTR, "fuxictr_peer.py")
SIZES = {
    "n_layers": 2,
    "n_heads": 1,
    "inner_size": 32,
    "hidden_dropout_prob": 0.1,
    "attn_dropout_prob": 0.1,
}
PEERS = {
    "din": {"FuxiCTR": FUXI},
    "dcnv2": {"FuxiCTR": FUXI},
    "sasrec": {
        f"RecBole, {loss}": Library(RECBOLE, "recbole_peer.py", {**SIZES, "loss_type": loss})
        for loss in ("BPR", "CE")
    },
}


@dataclass(frozen=True)
class Negatives:
    """Other negatives than one for each sample: fields of their column, and options of the model."""

    column: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


OTHER_NEGATIVES = {
    "Rowhaul, `draw: frequent`": Negatives({"draw": "frequent"}),
    "Rowhaul, 8 negatives": Negatives({"count": 8}),
    "Rowhaul, 8 negatives, softmax": Negatives({"count": 8}, {"negatives_loss": "softmax"}),
    "Rowhaul, 64 negatives, softmax": Negatives({"count": 64}, {"negatives_loss": "softmax"}),
}


def contenders(split: Split, others: dict[str, Split], folder: Path) -> dict[str, Contender]:
    """Every side by its name, ours first; ``others`` have the same samples with other negatives."""
    ours = {
        "Rowhaul": Ours(split),
        "Rowhaul, Adam for rows": Ours(split, by_adam=True),
        **{name: Ours(one, **OTHER_NEGATIVES[name].options) for name, one in others.items()},
    }
    theirs = {name: one.start(split, folder / name) for name, one in PEERS[split.model].items()}
    return {**ours, **theirs}


def measure(split: Split, others: dict[str, Split], folder: Path) -> dict[str, tuple[float, float]]:
    """Train all by turns; the quality and the samples a processor second of each."""
    sides = contenders(split, others, folder)
    seconds = dict.fromkeys(sides, 0.0)
    for first in range(0, len(split.train), TURN):
        for name, one in sides.items():
            spent = one.train(first, min(first + TURN, len(split.train)))
            seconds[name] += spent if first else 0.0  # kernels may have been compiled
    samples = sum(len(one) for one in split.train[TURN:])
    found = {}
    for name, one in sides.items():
        found[name] = (split.quality(one.scores()), samples / seconds[name] if samples else float("nan"))
        one.close()
    return found


def lines(found: Sequence[dict[str, tuple[float, float]]]) -> list[list[object]]:
    """A line for each side: means and spreads of qualities, medians of speeds and of their ratios."""
    made: list[list[object]] = []
    for name in found[0]:
        qualities = [one[name][0] for one in found]
        ratio = statistics.median(one["Rowhaul"][1] / one[name][1] for one in found)
        made.append(
            [
                name,
                f"{statistics.mean(qualities):.4f} ± {np.std(qualities):.4f}",
                statistics.median(one[name][1] for one in found),
                "" if name == "Rowhaul" else f"{ratio:.2f}x",
            ]
        )
    return made


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=100_000, help="to train on; 900,000 are an epoch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_machine("scikit-learn")
    console.print("One thread; samples a second of processor time.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "movielens-1m"
        prepare(movielens_1m(), folder, "movielens", history=HISTORY)
        for model in arguments.models:
            found = []
            for seed in range(arguments.seeds):
                given = model, folder, seed, arguments.samples
                split = Split.read(*given)
                others = {  # tested on the same samples, all movies in the same order
                    name: replace(split, train=Split.read(*given, **one.column).train)
                    for name, one in OTHER_NEGATIVES.items()
                    if split.ranks
                }
                with tempfile.TemporaryDirectory() as peers:
                    found.append(measure(split, others, Path(peers)))
                console.print(model, seed, found[-1])
            samples = sum(map(len, split.train))
            print_table(
                f"{model}, {arguments.seeds} seed(s), {samples:,} samples",
                ["", "NDCG@10" if split.ranks else "AUC", "samples/s", "Rowhaul / it"],
                lines(found),
            )


if __name__ == "__main__":
    main()
