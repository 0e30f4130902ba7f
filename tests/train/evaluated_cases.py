"""Ranks, as threads, that evaluate between segments, and what one process makes of the same model."""

import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "exact"))
from in_process_cluster import Rank, train_batch
from training_case import Case, row_sizes
from watched_parts import no_delay

from rowhaul.data.samples import Samples
from rowhaul.errors import ClusterError, DataError, UnknownKeyError
from rowhaul.nn import Batch, EmbeddingBagConfig
from rowhaul.nn.local_rows import TableRows
from rowhaul.optim import row_optimizer
from rowhaul.schedule import CacheSettings, HotRows, ScheduleSettings, Topology
from rowhaul.train.distributed.evaluation import evaluate, score
from rowhaul.train.distributed.tables import only_collection
from rowhaul.train.metrics import BinaryMetrics, MetricValues
from rowhaul.transport.in_process import WAIT_SECONDS, InProcessNetwork

TABLES = (
    EmbeddingBagConfig(embedding_dim=3, name="a", feature_names=["f0", "f1"]),
    EmbeddingBagConfig(embedding_dim=2, name="b", feature_names=["f2"]),
    EmbeddingBagConfig(embedding_dim=3, name="c", feature_names=["f3"]),
)
TRAINED_KEYS, ALL_KEYS = 14, 25
STORE = Topology(num_workers=3)
TOPOLOGIES = {
    "one store": STORE,
    "two stores": Topology(num_workers=3, num_stores=2),
    "peer to peer": Topology(num_workers=3, peer_to_peer=True),
    "co-located": Topology(num_workers=3, colocated=True),
    "co-located, peer to peer": Topology(num_workers=3, colocated=True, peer_to_peer=True),
}
HOT = HotRows(np.array([0, 0, 1]), np.array([1, 2, 3]))


def some_batches(sizes, num_keys, seed=0):
    numbers = np.random.default_rng(seed)
    batches, first = [], 0
    for size in sizes:
        lengths = numbers.integers(0, 3, (4, size)).astype(np.int32)
        batches.append(
            Samples(
                features=("f3", "f0", "f1", "f2"),
                values=numbers.integers(0, num_keys, lengths.sum()),
                lengths=lengths,
                dense=numbers.standard_normal((size, 2)).astype(np.float32),
                labels=numbers.integers(0, 2, size).astype(np.float32),
                index=np.arange(first, first + size),
            )
        )
        first += size
    return batches


def a_case(
    topology=STORE, sync="on-demand", hot=None, dtype=torch.float32, optimizer="adagrad", dispatcher="joint"
):
    rule = row_optimizer(optimizer, lr=0.1)
    settings = ScheduleSettings(
        topology=topology,
        sizes=row_sizes(TABLES, rule, dtype),
        prices=(1, 1, 10),
        cache=CacheSettings(capacity=28),
        dispatcher=dispatcher,
        sync=sync,
        hot=hot,
    )
    batches = tuple(some_batches([9] * 9, TRAINED_KEYS))
    return Case(TABLES, rule, settings, batches, dtype=dtype, segments=(3, 3, None))


@dataclass
class Evaluated:
    """What one rank saw between two segments."""

    metrics: MetricValues | None = None
    logits: dict[int, np.ndarray] = field(default_factory=dict)  # by the first sample of the batch
    progress: list[tuple[int, int]] = field(default_factory=list)
    error: Exception | None = None


class EvaluatingRank(Rank):
    """A rank that does something after every segment, once it is known what it has."""

    between = staticmethod(lambda rank: None)

    def _rest(self):
        rest = super()._rest()
        self.between(self)
        return rest


def run(case, between=lambda rank: None, on_unknown="init", delay=None):
    """Train a case on threads; every rank calls ``between`` after each segment. Returns the ranks."""
    num_ranks = case.settings.topology.num_ranks
    network = InProcessNetwork(num_ranks, delay=delay)
    ranks = []
    for number in range(num_ranks):
        rank = EvaluatingRank(
            case,
            number,
            network,
            no_delay,
            train_batch,
            lambda rank, iteration: False,
            lambda iteration: False,
        )
        rank.between, rank.evaluated = between, []
        rank.model.rows.on_unknown = on_unknown
        ranks.append(rank)
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1.25 * WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "ranks hang"
    for rank in ranks:
        if rank.error is not None:
            raise rank.error
    return ranks


def evaluating(batches, make_metrics=lambda: None):
    """Evaluate and score, and remember what came of it."""

    def between(rank):
        seen = Evaluated()
        rank.evaluated.append(seen)
        try:
            seen.metrics = evaluate(
                rank.training, batches, lambda *done: seen.progress.append(done), make_metrics()
            )
        except (UnknownKeyError, DataError, ClusterError) as error:
            seen.error = error
            return
        for batch, logits in score(rank.training, batches):
            seen.logits[int(batch.index[0])] = logits.numpy()

    return between


def alone(case, ranks, segment, on_unknown="init"):
    """A single process that holds the rows and weights that the ranks had after a segment."""
    model = case.model()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), ranks[0].rests[segment].dense, strict=True):
            parameter.copy_(torch.from_numpy(value))
    for number, table in enumerate(case.tables):
        rows = {
            key: record
            for rank in ranks
            for (of, key), record in rank.rests[segment].rows.items()
            if of == number
        }
        if rows:
            model.rows.load_rows(table.name, np.array(list(rows), np.int64), np.stack(list(rows.values())))
    model.rows.on_unknown = on_unknown
    return model.eval()


def measured_alone(model, batches):
    metrics, logits = BinaryMetrics(), {}
    source = only_collection(model).source
    if isinstance(source, TableRows):
        source.key_counts = metrics.keys
    with torch.no_grad():
        for samples in batches:
            batch = Batch.from_samples(samples)
            logits[int(batch.index[0])] = model(batch).numpy()
            metrics.update(batch.labels, torch.from_numpy(logits[int(batch.index[0])]))
    return metrics.compute(), logits


def assert_equals_one_process(case, ranks, batches, on_unknown="init"):
    for segment in range(len(case.segments)):
        metrics, logits = measured_alone(alone(case, ranks, segment, on_unknown), batches)
        seen = [rank.evaluated[segment] for rank in ranks]
        for one in seen:
            assert repr(one.metrics) == repr(metrics)  # NaN is not equal to itself
        scored = [first for one in seen for first in one.logits]
        assert sorted(scored) == sorted(logits)
        for one in seen:
            for first, values in one.logits.items():
                assert values.dtype == logits[first].dtype
                assert values.tobytes() == logits[first].tobytes()


def assert_same_bits(ranks, others):
    """Everything that two runs left, and what they had after each segment."""
    for rank, other in zip(ranks, others, strict=True):
        assert rank.losses == other.losses
        for mine, theirs in zip(rank.rests, other.rests, strict=True):
            assert mine.rows.keys() == theirs.rows.keys()
            assert all(mine.rows[row].tobytes() == theirs.rows[row].tobytes() for row in mine.rows)
            assert all(map(np.array_equal, mine.dense, theirs.dense))
            assert (mine.cached, mine.waiting) == (theirs.cached, theirs.waiting)
            for name in ("states", "scheduler"):
                assert all(map(np.array_equal, getattr(mine, name).values(), getattr(theirs, name).values()))


def check(case):
    batches = some_batches([8, 8, 8, 8, 8, 8, 8, 5], ALL_KEYS, seed=1)
    ranks = run(case, evaluating(batches))
    assert_equals_one_process(case, ranks, batches)
    assert_same_bits(ranks, run(case))
    return ranks
