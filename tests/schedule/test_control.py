import numpy as np
import pytest

from rowhaul.errors import ConfigError
from rowhaul.schedule.control import ControlLog, ControlRecord


def posted(log, name, value, during):
    record = log.next(name, value, during=during)
    log.add(record, next_iteration=during + 1)
    return record


def test_a_record_is_in_force_two_iterations_later_and_once():
    log = ControlLog()
    record = posted(log, "shares", (1, 2), during=3)
    assert log.due(4) == []
    assert log.due(5) == [record]
    assert log.due(6) == []


def test_records_arrive_in_order_and_in_time():
    here, there = ControlLog(), ControlLog()
    records = [posted(here, "prices", (1, 10), during=0), posted(here, "dispatcher", "laia", during=0)]
    for record in records:
        there.add(record, next_iteration=2)
    assert here.due(2) == there.due(2) == records
    with pytest.raises(ConfigError, match="expected control record 2; got 0"):
        there.add(records[0], next_iteration=2)
    late = here.next("shares", (1, 1), during=1)
    with pytest.raises(ConfigError, match=r"too late: .* iteration 3 on, but iteration 4 is planned next"):
        there.add(late, next_iteration=4)


def test_a_record_reads_the_same_whatever_integers_it_was_made_of():
    numbers = np.array([3, 1])
    assert repr(ControlRecord(0, 2, "shares", tuple(numbers))) == repr(ControlRecord(0, 2, "shares", (3, 1)))
    assert repr(ControlRecord(0, 2, "tables_scored", numbers[0])) == repr(
        ControlRecord(0, 2, "tables_scored", 3)
    )


def test_an_unknown_record_names_the_known_ones():
    with pytest.raises(ConfigError, match="unknown control record 'share'; known are dispatcher, prices"):
        ControlRecord(0, 2, "share", 1)
