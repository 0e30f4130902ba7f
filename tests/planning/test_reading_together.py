"""Ranks of a host that decode some columns each for the rank that plans."""

import threading
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowhaul._threads import Failure
from rowhaul.data import parquet, prefetch
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import DataError
from rowhaul.planning.reading_together import ColumnServer, near_ranks, read_together
from rowhaul.transport.in_process import InProcessNetwork

SCHEMA = Schema(
    LabelColumn("click"),
    (DenseColumn("age"), DenseColumn("price", transform="log1p")),
    (IdColumn("user"), IdColumn("item"), IdColumn("tags")),
)
NUM_ROWS = 100


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch):
    monkeypatch.setattr(parquet, "READ_ROWS", 7)


@pytest.fixture
def log(tmp_path):
    return write_log(tmp_path)


def write_log(folder, seed=0, **columns):
    random = np.random.default_rng(seed)
    tags = [random.integers(0, 9, count).tolist() for count in random.integers(0, 4, NUM_ROWS)]
    made = {
        "click": pa.array(random.integers(0, 2, NUM_ROWS), pa.int8()),
        "age": pa.array(random.random(NUM_ROWS), pa.float32()),
        "price": pa.array(random.random(NUM_ROWS), pa.float32()),
        "user": pa.array(random.integers(0, 50, NUM_ROWS), pa.int64()),
        "item": pa.array(random.integers(0, 50, NUM_ROWS), pa.int64()),
        "tags": pa.array(tags, pa.list_(pa.int64())),
    }
    for number in range(2):
        part = pa.table({**made, **columns}).slice(number * 60, 60)
        pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=23)
    return folder


class Host:
    """The ranks of a host; the last one leads."""

    def __init__(self, leads, *follow, links=None):
        count = 1 + len(follow)
        network = InProcessNetwork(count, timeout_seconds=20.0)
        self.links = links or [network.links(rank) for rank in range(count)]
        self.failures = [Failure() for _ in range(count)]
        self.servers = []
        # Each is made in a thread, as its process would: it sends its digest to the leader.
        makers = [threading.Thread(target=self._serve, args=one) for one in enumerate(follow)]
        for maker in makers:
            maker.start()
        try:
            read_together(leads, self.links[-1], near_ranks(self.links[-1], range(count)), self.failures[-1])
        finally:
            for maker in makers:
                maker.join(20)

    def _serve(self, rank, stream):
        leader = len(self.links) - 1
        self.servers.append(ColumnServer(stream, self.links[rank], leader, self.failures[rank]))

    def join(self):
        """Wait until the threads have ended."""
        for server in self.servers:
            server.close()
            assert server._executor is None or not server._executor._thread.is_alive()
        assert [one.error for one in self.failures] == [None] * len(self.failures)


def stream_of(folder, **options):
    return SampleStream(folder, SCHEMA, 9, **options)


def assert_same(one, other):
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        for name in ("values", "lengths", "dense", "labels", "index"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))


def assert_ended_and_links_serve_again(host, log):
    """Of a host with two ranks beside the leader."""
    host.join()
    again = stream_of(log)
    host = Host(again, stream_of(log), stream_of(log), links=host.links)
    assert_same(list(again), list(stream_of(log)))
    host.join()


@pytest.mark.parametrize("num_others", [1, 2, 6])
@pytest.mark.parametrize(
    "options", [{}, {"shuffle_rows": 30, "epochs": 2, "seed": 3}, {"start": 31, "limit": 85}]
)
def test_the_leader_has_the_batches_that_it_would_read_alone(log, num_others, options):
    expected = list(stream_of(log, **options))
    leads = stream_of(log, **options)
    host = Host(leads, *[stream_of(log) for _ in range(num_others)])
    assert_same(list(leads), expected)
    host.join()
    assert_same(list(leads), expected)  # alone, from now on


def test_the_same_links_serve_again_after_a_stream_that_was_left_early(log):
    leads = stream_of(log, epochs=50)
    host = Host(leads, stream_of(log), stream_of(log))
    batches = iter(leads)
    next(batches)
    batches.close()
    assert_ended_and_links_serve_again(host, log)


@pytest.mark.timeout(60)
def test_a_leader_that_has_failed_waits_for_nobody(log):
    network, failure, leads = InProcessNetwork(2, timeout_seconds=3600.0), Failure(), stream_of(log)
    stuck, links = network.links(0), network.links(1)
    stuck.post({1: np.empty(24, np.uint8)}, {1: np.frombuffer(bytearray(leads.files_digest()), np.uint8)})
    read_together(leads, links, [0], failure)
    (columns,) = leads._sharing.others
    columns.read_columns(0, 0, 3)  # is not answered
    failure.set(RuntimeError("rank 0 is stuck"))
    columns.close()


def test_a_stream_that_is_left_while_it_reads_leaves_nothing_on_the_links(log, monkeypatch):
    """As from a slow disk: the thread that loads outlives the stream, and ends the other ranks itself."""
    monkeypatch.setattr(prefetch, "_PATIENCE_SECONDS", 0.01)
    leads, slow = stream_of(log, epochs=50), threading.Event()
    host = Host(leads, stream_of(log), stream_of(log))
    read_columns = leads._rows.read_columns

    def read_slowly(*args):
        for number, block in enumerate(read_columns(*args)):
            if number == 2:
                slow.wait(20)
            yield block

    monkeypatch.setattr(leads._rows, "read_columns", read_slowly)
    batches = leads.prepared(lambda samples: samples)
    next(batches)
    batches.close()
    slow.set()
    assert_ended_and_links_serve_again(host, log)


def test_what_another_rank_cannot_read_ends_the_leaders_stream_with_its_error(tmp_path):
    ages = np.ones(NUM_ROWS, np.float32)
    ages[70] = np.nan
    write_log(tmp_path, age=pa.array(ages), price=pa.array(ages))
    leads = stream_of(tmp_path)
    Host(leads, stream_of(tmp_path), stream_of(tmp_path), stream_of(tmp_path))
    with pytest.raises(DataError, match=r"part-1.parquet, row 10 .* is nan; a finite float32") as raised:
        list(leads)
    with pytest.raises(DataError) as alone:
        list(stream_of(tmp_path))
    assert str(raised.value).replace("price", "age") == str(alone.value).replace("price", "age")


def test_a_file_that_is_gone_is_named_by_the_rank_that_cannot_open_it(log, tmp_path_factory):
    other = write_log(tmp_path_factory.mktemp("other"))
    leads, follows = stream_of(log), stream_of(other)
    (other / "part-1.parquet").unlink()
    Host(leads, follows)
    with pytest.raises(DataError, match=r"part-1.parquet: no such file") as raised:
        list(leads)
    assert raised.value.__notes__ == ["(on rank 0, which reads a part of the columns)"]


def test_ranks_that_opened_other_files_are_named(log, tmp_path_factory):
    other = write_log(tmp_path_factory.mktemp("other"), seed=1)
    with pytest.raises(
        DataError, match=r"rank 1 opened other files, .* than rank 2, .* give every rank the same"
    ):
        Host(stream_of(log), stream_of(log), stream_of(other))


def test_ranks_with_loaders_of_their_own_decode_nothing(log):
    expected = list(stream_of(log))
    leads = stream_of(log)
    host = Host(leads, None, stream_of(log))
    assert_same(list(leads), expected)
    host.join()
    host = Host(None, stream_of(log), None)  # the leader has one: nobody reads for it
    host.join()


def test_there_may_be_more_ranks_than_columns(tmp_path):
    write_log(tmp_path)
    schema = Schema(LabelColumn("click"), (), (IdColumn("user"),))
    leads = SampleStream(tmp_path, schema, 9)
    host = Host(leads, *[SampleStream(tmp_path, schema, 9) for _ in range(3)])
    assert_same(list(islice(leads, None)), list(SampleStream(tmp_path, schema, 9)))
    host.join()
