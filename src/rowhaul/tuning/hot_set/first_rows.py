"""The rows that every worker holds: the most frequent ones at the beginning of the data."""

from __future__ import annotations

from itertools import islice

import numpy as np

from rowhaul.data.stream import SampleStream
from rowhaul.nn import TableCollection
from rowhaul.schedule import HotRows
from rowhaul.simulate.trace import RowCounter
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed.tables import ids_of, layout_of


def profile_hot_rows(
    stream: SampleStream, config: ClusterConfig, collection: TableCollection
) -> HotRows | None:
    """Return the ``hot_rows`` most frequent rows of the first batches; the same on every rank.

    A resumed run must keep its hot rows, so counting starts at the beginning of the data. Within a budget
    they are rows as these batches read them when training begins with them. None with ``hot_rows: auto``: see
    `HotSetController`.
    """
    if not config.num_hot_rows:
        return None
    counter = RowCounter(len(collection.table_configs()))
    beginning = stream.from_beginning(config.hot_profile * stream.batch_size)
    ids = (ids_of(collection, samples) for samples in islice(beginning, config.hot_profile))
    for read in layout_of(collection).records_at_first(ids):
        features = read.by_feature
        assert features is not None
        keys = np.split(features.values, np.cumsum(features.counts)[:-1])
        for table, some in zip(features.tables.tolist(), keys, strict=True):
            counter.add(table, some)
    return counter.most_frequent(config.num_hot_rows)
