"""The rows that every worker holds: the most frequent ones at the beginning of the data."""

from __future__ import annotations

from itertools import islice

import numpy as np

from rowhaul.data.stream import SampleStream
from rowhaul.nn import EmbeddingBagCollection
from rowhaul.schedule import HotRows
from rowhaul.simulate.trace import RowCounter
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed.training import tables_of_features


def profile_hot_rows(
    stream: SampleStream, config: ClusterConfig, collection: EmbeddingBagCollection
) -> HotRows | None:
    """Return the ``hot_rows`` most frequent rows of the first batches; the same on every rank.

    A resumed run must keep its hot rows, so counting starts at the beginning of the data. None with
    ``hot_rows: auto``: see `HotSetController`.
    """
    if not config.num_hot_rows:
        return None
    counter = RowCounter(len(collection.embedding_bag_configs()))
    beginning = stream.from_beginning(config.hot_profile * stream.batch_size)
    for samples in islice(beginning, config.hot_profile):
        ends = np.cumsum(samples.lengths.sum(axis=1))[:-1]
        tables = tables_of_features(collection, samples.features)
        for table, keys in zip(tables, np.split(samples.values, ends), strict=True):
            counter.add(table, keys)
    return counter.most_frequent(config.num_hot_rows)
