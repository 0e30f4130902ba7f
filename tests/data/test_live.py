"""A stream given to a cluster: what ends the wait for samples that do not come."""

import os
import threading

import pytest

from rowhaul.data.sources.lines import LinesSource
from rowhaul.data.sources.live import LiveStream


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


def test_a_cluster_that_wants_no_more_ends_the_wait(stream):
    threading.Timer(0.3, stream.end_waiting).start()
    assert list(stream) == []
    assert not stream.stopped
