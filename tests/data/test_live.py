"""A stream: what ends the wait of a cluster for samples that do not come; the negatives that are drawn."""

import os
import threading
from collections import deque
from itertools import takewhile
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest

from click_logs import click_log
from rowhaul.data.block import Block
from rowhaul.data.columns import Ids
from rowhaul.data.schema import Schema
from rowhaul.data.sources import live
from rowhaul.data.sources.folder import FolderSource
from rowhaul.data.sources.lines import LinesSource
from rowhaul.data.sources.live import Idle, LiveStream
from rowhaul.data.sources.source import Chunk, SetAside
from rowhaul.data.stream import SampleStream
from rowhaul.data.targets import Targets
from rowhaul.train import TrainConfig
from rowhaul.train.run_stream import open_stream
from rowhaul.train.stream_config import StreamConfig


@pytest.fixture
def stream(log_schema):
    """A stream whose writer writes nothing."""
    reading, writing = os.pipe()
    yield LiveStream(LinesSource(log_schema, {}, reading), log_schema, 4)
    os.close(writing)
    os.close(reading)


def test_a_stop_ends_the_wait_which_is_noted(stream):
    stream.should_stop = lambda: True
    assert list(stream) == []
    assert stream.stopped


def test_what_a_cluster_waits_for_can_be_told_meanwhile(stream):
    stream.source.notes.append("the source is away; waiting for it")
    told = []
    stream.on_idle = lambda: told.extend(stream.news())
    stream.should_stop = lambda: bool(told)
    assert list(stream) == []
    assert told == ["the source is away; waiting for it"]


def test_a_cluster_that_wants_no_more_ends_the_wait(stream):
    threading.Timer(0.3, stream.end_waiting).start()
    assert list(stream) == []
    assert not stream.stopped


class Busy:
    """A source that never pauses: a sample, or one that is set aside, again and again."""

    name, patience = "busy", 1 << 60

    def __init__(self, is_bad):
        self.kinds, self.notes, self._is_bad, self.num_read = {}, deque(), is_bad, 0

    def read(self, position):
        while self.num_read < 1000:
            self.num_read += 1
            count = 0 if self._is_bad else 1
            ids = (Ids(np.arange(count), None),)
            block = Block(ids, np.empty((count, 0), np.float32), Targets(np.ones(count, np.float32)))
            aside = [(0, SetAside(f"entry {self.num_read}", "it is bad"))] if self._is_bad else []
            yield Chunk(block, lambda count: {"at": count}, aside)

    def event_time(self, position):
        return 0


@pytest.mark.parametrize("is_bad", [True, False])
def test_a_source_that_never_pauses_lets_the_run_look_around_between_batches(is_bad, monkeypatch):
    monkeypatch.setattr(live, "_LOOK_SECONDS", 0.0, raising=False)
    source = Busy(is_bad)
    schema = Schema.from_dict({"label": "y", "ids": ["a"]})
    stream = LiveStream(source, schema, 1 << 20)
    batches = stream.prepared(lambda samples: samples)
    assert isinstance(next(batches), Idle)
    assert source.num_read < 1000
    batches.close()
    assert bool(stream.news()) == is_bad
    stream = LiveStream(Busy(is_bad), schema, 1 << 20)
    stream.should_stop = lambda: True
    assert list(stream) == []
    assert stream.stopped


def test_negatives_are_those_of_a_run_over_the_same_files(tmp_path):
    schema = Schema.from_dict(
        {
            "label": "click",
            "ids": ["item", {"name": "others", "table": "item", "negatives_of": "item", "count": 3}],
        }
    )
    pq.write_table(click_log(100, 1).select(["click", "item"]), tmp_path / "part-0.parquet")

    def negatives(seed):
        stream = LiveStream(FolderSource(tmp_path, schema, {}), schema, 50, seed=seed)
        read = takewhile(lambda one: not isinstance(one, Idle), stream.prepared(lambda samples: samples))
        return [one.values.tolist() for one in read]

    assert negatives(7) == [one.values.tolist() for one in SampleStream(tmp_path, schema, 50, seed=7)]
    assert negatives(7) != negatives(8)


def test_a_stream_of_a_run_has_its_seed(tmp_path, log_schema):
    config = TrainConfig(seed=11, stream=StreamConfig(follow=True))
    with patch("rowhaul.train.run_stream.LiveStream") as made:
        open_stream(config, log_schema, str(tmp_path), None, 0, {})
    assert made.call_args.kwargs["seed"] == 11
