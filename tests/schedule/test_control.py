import pytest

from rowhaul.errors import ConfigError
from rowhaul.schedule.control import ControlLog, ControlRecord


def test_a_record_is_in_force_two_iterations_later_and_once():
    log = ControlLog()
    record = log.post("shares", (1, 2), during=3)
    assert log.due(4) == []
    assert log.due(5) == [record]
    assert log.due(6) == []


def test_another_rank_receives_the_same_records_in_order():
    here, there = ControlLog(), ControlLog()
    records = [here.post("prices", (1, 10), during=0), here.post("dispatcher", "laia", during=0)]
    for record in records:
        there.receive(record)
    assert here.due(2) == there.due(2) == records
    with pytest.raises(ConfigError, match="control record 2 was due, but 0 came"):
        there.receive(records[0])


def test_an_unknown_record_names_the_known_ones():
    with pytest.raises(ConfigError, match="no control record 'share'; known are dispatcher, prices, shares"):
        ControlRecord(0, 2, "share", 1)
