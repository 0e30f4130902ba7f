"""Lines of JSON from a pipe: what a run that resumes says of the lines that it passes over."""

import os

import pytest

from rowhaul.data.schema import Schema
from rowhaul.data.sources.lines import LinesSource

SCHEMA = Schema.from_dict({"label": "y", "ids": ["a"]})


def read(num_lines, position, last_break):
    """Read so many lines; returns their ids and what was told."""
    lines = "\n".join(f'{{"y": 1, "a": {number}}}' for number in range(num_lines))
    reading, writing = os.pipe()
    os.write(writing, (lines + "\n" * last_break).encode())
    os.close(writing)
    source = LinesSource(SCHEMA, {}, reading)
    ids = [one for chunk in source.read(position) if chunk for one in chunk.block.ids[0].values.tolist()]
    os.close(reading)
    return ids, list(source.notes)


@pytest.mark.parametrize("last_break", [True, False])
def test_lines_that_are_passed_over_are_told(last_break):
    assert read(5, None, last_break) == (list(range(5)), [])
    ids, (note,) = read(5, {"lines": 3}, last_break)
    assert (ids, "first 3 lines are passed over" in note) == ([3, 4], True)
    ids, (note,) = read(5, {"lines": 5}, last_break)
    assert (ids, "first 5 lines are passed over" in note) == ([], True)


@pytest.mark.parametrize("last_break", [True, False])
def test_other_lines_than_those_of_the_run_are_told_where_they_are_too_few(last_break):
    ids, (note,) = read(5, {"lines": 7}, last_break)
    assert ids == []
    assert "ended after 5 lines" in note
    assert "after line 7; to resume, send the same lines again" in note
