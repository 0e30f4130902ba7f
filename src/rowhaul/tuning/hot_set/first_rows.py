"""Which rows every worker holds: the most frequent ones at the beginning of the data."""

from __future__ import annotations

from itertools import islice

from rowhaul.data.stream import SampleStream
from rowhaul.nn import EmbeddingBagCollection
from rowhaul.schedule import HotRows
from rowhaul.simulate.trace import RowCounter
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed.training import tables_of_features


def profile_hot_rows(
    stream: SampleStream, config: ClusterConfig, collection: EmbeddingBagCollection
) -> HotRows | None:
    """The ``hot_rows`` most frequent rows of the first batches; the same on every rank that reads them.

    A run that is resumed must keep its hot rows, so they are counted from the beginning, not from where it
    goes on. With ``hot_rows: auto`` none are given: see `hot_set_controller`.
    """
    if not config.num_hot_rows:
        return None
    counter = RowCounter(len(collection.embedding_bag_configs()))
    beginning = stream.from_beginning(config.hot_profile * stream.batch_size)
    for samples in islice(beginning, config.hot_profile):
        first = 0
        tables = tables_of_features(collection, samples.features)
        for table, lengths in zip(tables, samples.lengths, strict=True):
            last = first + int(lengths.sum())
            counter.add(table, samples.values[first:last])
            first = last
    return counter.most_frequent(config.num_hot_rows)
