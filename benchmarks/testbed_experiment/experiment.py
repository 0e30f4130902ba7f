"""What is trained on the testbed: mechanisms, data and model, as the ranks and who starts them know it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch

from figures.traces import Trace, generated, movielens
from rowhaul.data.samples import Samples
from rowhaul.nn import Batch, EmbeddingBagCollection, EmbeddingBagConfig
from rowhaul.optim import SGD

NUM_FAST, NUM_SLOW = 4, 4
FAST_MBIT, SLOW_MBIT, STORE_MBIT = 80, 8, 800
PER_WORKER = 128
CACHE_SHARE = 0.10  # of all rows of the log, on each worker


@dataclass(frozen=True)
class Mechanism:
    """A line of the table."""

    name: str
    dispatcher: str
    sync: str = "on-demand"
    shares: tuple[int, ...] | None = None
    auto: bool = False


STILL = "nothing moves"  # every worker trains its own rows only: what an iteration takes beside transfer
FAST_ONLY = (1,) * NUM_FAST + (0,) * NUM_SLOW
MECHANISMS = (
    Mechanism(STILL, "round-robin"),
    Mechanism("vanilla", "random", "full"),
    Mechanism("laia", "laia"),
    Mechanism("esd:1", "esd:1"),
    Mechanism("joint", "joint"),
    Mechanism("laia, fast workers only", "laia", shares=FAST_ONLY),
    Mechanism("joint, shares auto", "joint", auto=True),
)


@dataclass(frozen=True)
class Setting:
    """One data set on the testbed."""

    data: str
    iterations: int  # of each mechanism, the warm-up included
    segment: int  # iterations of one mechanism before the next has its turn
    warmup: int  # iterations of each mechanism that do not count
    dim: int  # wide where few rows move, so that the frame a shaped link lets through at once matters little
    log_samples: int = 0  # of the log whose beginning is trained, where it is longer: caches go by its rows
    mechanisms: tuple[str, ...] = tuple(one.name for one in MECHANISMS)

    def warmup_of(self, mechanism: Mechanism) -> int:
        """Iterations of a mechanism that do not count; one that tries shares needs longer."""
        return max(self.warmup, 2 * self.iterations // 3) if mechanism.auto else self.warmup

    @property
    def batch_size(self) -> int:
        return PER_WORKER * (NUM_FAST + NUM_SLOW)

    def trace(self) -> Trace:
        samples = self.iterations * self.batch_size
        if self.data == "movielens-1m":
            return movielens(samples)
        log = generated(self.data, max(samples, self.log_samples))
        beginning = tuple(keys[:samples] for keys in log.keys), tuple(has[:samples] for has in log.present)
        return Trace(log.name, *beginning, log.columns, log.num_rows)

    def trace_of(self, mechanism: Mechanism) -> Trace:
        """What a mechanism trains on; for the one that calibrates, rows that no two samples share."""
        trace = self.trace()
        if mechanism.name != STILL:
            return trace
        keys = np.arange(len(trace)) % self.batch_size
        everywhere = np.ones(len(trace), np.bool_)
        columns = len(trace.columns)
        return Trace(
            STILL, (keys,) * columns, (everywhere,) * columns, trace.columns, self.batch_size * columns
        )

    def plain(self) -> dict[str, object]:
        return asdict(self)


class Net(torch.nn.Module):
    """Pooled rows and one small hidden layer: what moves is rows."""

    def __init__(self, features: tuple[str, ...], dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [EmbeddingBagConfig(embedding_dim=dim, name=name, feature_names=[name]) for name in features]
        self.num_features, self.dim = len(features), dim
        self.rows = EmbeddingBagCollection(tables, optimizer=SGD(lr=0.05))
        self.hidden = torch.nn.Linear(dim, 64)
        self.last = torch.nn.Linear(64, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        pooled = self.rows(batch.ids).values().reshape(len(batch), self.num_features, self.dim)
        return self.last(torch.relu(self.hidden(pooled.sum(dim=1)))).squeeze(1)


def global_batches(trace: Trace, size: int) -> Iterator[Samples]:
    """The trace in global batches; labels are drawn, because what is learned does not matter here."""
    for start in range(0, len(trace) - size + 1, size):
        part = slice(start, start + size)
        lengths = np.stack([has[part] for has in trace.present]).astype(np.int32)
        values = [keys[part][has[part]] for keys, has in zip(trace.keys, trace.present, strict=True)]
        index = np.arange(start, start + size)
        labels = ((index * 2654435761) % 4 == 0).astype(np.float32)
        yield Samples(
            trace.columns, np.concatenate(values), lengths, np.zeros((size, 0), np.float32), labels, index
        )
