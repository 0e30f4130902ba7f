"""When samples happened: read from Parquet and from messages, the newest of a batch."""

import json
import os
from dataclasses import replace
from itertools import takewhile
from time import time as now

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from click_logs import click_log
from rowhaul.data.preparing import prepare
from rowhaul.data.schema import Schema, TimeColumn
from rowhaul.data.sources.folder import FolderSource
from rowhaul.data.sources.live import Idle, LiveStream
from rowhaul.data.sources.messages import MessageDecoder
from rowhaul.data.stream import SampleStream
from rowhaul.errors import DataError

AT = 1_700_000_000 + np.random.default_rng(4).integers(0, 10**6, 100)
COLUMNS = {
    "seconds": (pa.array(AT), "s"),
    "float seconds": (pa.array(AT + 0.25), "s"),
    "milliseconds": (pa.array(AT * 1000 + 999), "ms"),
    "timestamps": (pa.array(AT * 1_000_000, pa.timestamp("us", tz="UTC")), "s"),
    "dates": (pa.array(AT // 86_400, pa.int32()).cast(pa.date32()), "s"),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_batch_has_the_time_of_its_newest_event(kind, tmp_path, log_schema):
    column, unit = COLUMNS[kind]
    pq.write_table(click_log(100, 1).append_column("at", column), tmp_path / "part-0.parquet")
    schema = replace(log_schema, time=TimeColumn("at", unit))
    batches = list(SampleStream(tmp_path, schema, 30))
    days = AT // 86_400 * 86_400 if kind == "dates" else AT
    assert [one.time for one in batches] == [
        int(days[first : first + 30].max()) for first in range(0, 100, 30)
    ]
    assert batches[0].take(np.array([3])).time == batches[0].time  # of the global batch
    assert next(iter(SampleStream(tmp_path, log_schema, 30))).time == 0
    unlabelled = SampleStream(tmp_path, schema, 30, require_label=False)
    assert next(iter(unlabelled)).time == 0  # only training asks


@pytest.mark.parametrize("value", [None, -1, 10**12])
def test_what_is_no_time_is_refused_or_set_aside(value, tmp_path, log_schema):
    at = [*AT[:5].tolist(), value]
    table = click_log(6, 1)
    pq.write_table(table.append_column("at", pa.array(at)), tmp_path / "part-0.parquet")
    schema = replace(log_schema, time=TimeColumn("at"))
    with pytest.raises(DataError, match=r"row 5 .*time column 'at' is"):
        list(SampleStream(tmp_path, schema, 6))
    rows = [{**row, "at": one} for row, one in zip(table.to_pylist(), at, strict=True)]
    decoder = MessageDecoder(schema, {})
    for _ in range(2):  # the second time all together, by Arrow
        good = decoder.decode([json.dumps(row).encode() for row in rows[:5]], str)
        assert good.block.times.tolist() == AT[:5].tolist()
    decoded = decoder.decode([json.dumps(row).encode() for row in rows], str)
    assert decoded.block.times.tolist() == AT[:5].tolist()
    ((_, aside),) = decoded.set_aside
    assert "time field 'at' is" in aside.why


def test_a_schema_keeps_its_time(tmp_path, log_schema):
    for time in (TimeColumn("at"), TimeColumn("at", "ms")):
        schema = replace(log_schema, time=time)
        assert Schema.from_dict(schema.to_dict()) == schema
    with pytest.raises(DataError, match="unknown unit"):
        TimeColumn("at", "days")
    with pytest.raises(DataError, match="named more than once"):
        replace(log_schema, time=TimeColumn("price"))
    with pytest.raises(DataError, match="prepare does not keep"):
        prepare(tmp_path / "log.csv", tmp_path / "out", "csv", schema=schema)
    column = pa.array(["noon"] * 100)
    pq.write_table(click_log(100, 1).append_column("at", column), tmp_path / "part-0.parquet")
    with pytest.raises(DataError, match="a time is a timestamp"):
        SampleStream(tmp_path, schema, 30)


def test_without_a_time_column_a_batch_of_a_stream_has_the_time_at_which_its_samples_came(
    tmp_path, log_schema
):
    came = (1_700_000_500, 1_700_000_000, 1_700_000_900)  # the second one was written long ago
    for number, when in enumerate(came):
        path = tmp_path / f"part-{number}.parquet"
        pq.write_table(click_log(50, number), path)
        os.utime(path, (when, when))

    def batches(position):
        """(time, position after it) of each batch from a position on, until nothing more comes."""
        stream = LiveStream(FolderSource(tmp_path, log_schema, {}), log_schema, 30, position=position)
        read = takewhile(lambda one: not isinstance(one, Idle), stream.prepared(lambda samples: samples))
        return [(one.time, stream.position) for one in read]

    whole = batches(None)
    first, _, last = came
    assert [time for time, _ in whole] == [first, first, first, last, last]  # it never goes back
    for place, (_, position) in enumerate(whole[:-1], start=1):
        assert batches(position) == whole[place:]


@pytest.mark.parametrize("hours", [14, 48])
def test_the_time_of_a_batch_goes_by_no_event_that_is_far_ahead(hours, tmp_path, log_schema):
    at = np.append(AT[:29], int(now()) + 3600 * hours)  # clocks may differ by hours
    pq.write_table(click_log(30, 1).append_column("at", pa.array(at)), tmp_path / "part-0.parquet")
    (batch,) = SampleStream(tmp_path, replace(log_schema, time=TimeColumn("at")), 30)
    assert len(batch) == 30
    assert batch.time == (at.max() if hours == 14 else AT[:29].max())


@pytest.mark.parametrize("hours", [14, 48])
def test_a_batch_of_a_stream_has_no_time_that_is_far_from_now(hours, tmp_path, log_schema):
    pq.write_table(click_log(30, 1), tmp_path / "part-0.parquet")
    before = int(now())
    when = before + 3600 * hours
    os.utime(tmp_path / "part-0.parquet", (when, when))
    (batch,) = takewhile(
        lambda one: not isinstance(one, Idle),
        LiveStream(FolderSource(tmp_path, log_schema, {}), log_schema, 30).prepared(lambda samples: samples),
    )
    assert batch.time == when if hours == 14 else before <= batch.time <= now()
