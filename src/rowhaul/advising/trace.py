"""A sample of the data as the scheduler sees it: the first batches' ids, and rows counted in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import DataError
from rowhaul.runtime.layout import TableLayout
from rowhaul.schedule import HotRows, IdBatch, RowPolicy
from rowhaul.simulate.trace import RowCounter
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.tables import ids_of, layout_of, only_collection
from rowhaul.train.trainer import make_model

FEWEST_BATCHES = 8


@dataclass(frozen=True)
class Trace:
    """The beginning of the data.

    Args:
        layout: of the model's tables.
        batches: ids of global batches.
        batch_size: samples of a batch.
        dense_bytes: of the gradients that workers sum in every step.
        is_whole: whether the data has no more.
        pruned: whether rows are pruned; then batches name the chunks that are left.
        policies: of the tables, as training will have them; none where rows are pruned.
    """

    layout: TableLayout
    batches: list[IdBatch]
    batch_size: int
    dense_bytes: int
    is_whole: bool
    pruned: bool = False
    policies: tuple[RowPolicy, ...] = ()

    @classmethod
    def read(cls, config: TrainConfig, schema: Schema, data: Any, num_batches: int) -> Trace:
        """Read the first ``num_batches`` batches; fewer where the data ends."""
        model = make_model(config, schema)
        collection = only_collection(model)
        size, layout = config.batch_size, layout_of(collection).settled()
        stream = SampleStream(data, schema, size, limit=num_batches * size, require_label=False)
        found = [ids_of(collection, samples) for samples in stream if len(samples) == size]
        if len(found) < FEWEST_BATCHES:
            raise DataError(
                f"the data holds {len(found)} whole batches of {size:,} samples, and a prediction needs "
                f"{FEWEST_BATCHES}: give more data, or a smaller --batch-size"
            )
        dense = sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)
        if config.cluster.dense_wire == "bfloat16":
            dense //= 2
        whole = SampleStream(data, schema, size, require_label=False).num_batches <= len(found)
        pruned = config.prune.is_used
        policies = () if pruned else config.row_policies([one.name for one in collection.table_configs()])
        return cls(layout, layout.records_read(found), size, dense, whole, pruned, policies)

    def most_frequent(self, count: int) -> HotRows:
        """The rows that the batches name most often."""
        counter = RowCounter(1 + max(int(batch.tables.max(initial=0)) for batch in self.batches))
        for batch in self.batches:
            for table in np.unique(batch.tables):
                counter.add(int(table), batch.keys[batch.tables == table])
        return counter.most_frequent(count)
