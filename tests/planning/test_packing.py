"""A planned batch as a file without a name: everything comes back, and nobody can change it for others."""

import dataclasses
import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from planned_cases import all_plans, assert_same, planner, samples, settings, streams

from rowhaul.planning.packing import pack, unpack
from rowhaul.planning.planner import samples_digest
from rowhaul.schedule import ControlRecord

FOLLOWER = Path(__file__).with_name("plan_follower.py")
LEADER = 7


@pytest.fixture(scope="module")
def planned():
    return all_plans(planner([samples(0), samples(1)], ahead=10))[1]


def through_a_file(planned):
    file, size = pack(planned)
    try:
        assert os.fstat(file).st_size == size
        return unpack(file, size)
    finally:
        os.close(file)


def arrays_of(value):
    if isinstance(value, np.ndarray):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from arrays_of(getattr(value, field.name))


@examples(max_examples=60)
@given(streams())
def test_plans_and_samples_of_any_shape_come_back_equal(case):
    chosen, batches = case
    made = all_plans(planner(batches, chosen=settings(**chosen), ahead=100))
    assert len(made) == len(batches)
    for planned in made:
        back = through_a_file(planned)
        assert_same(back, planned)
        assert dataclasses.replace(back.plan, ids=None).digest() == planned.plan_digest
        assert samples_digest(back.samples) == planned.samples_digest


def test_control_records_come_back_equal():
    made = planner([samples(0)], ahead=0)
    for number, (name, value) in enumerate([("shares", (3, 1)), ("dispatcher", "esd:1"), ("prices", (5, 2))]):
        made.receive(ControlRecord(number, 0, name, value))
    made.allow(0)
    planned = made.next()
    made.close()
    assert len(planned.plan.controls) == 3
    back = through_a_file(planned)
    assert_same(back, planned)
    assert dataclasses.replace(back.plan, ids=None).digest() == planned.plan_digest


def test_arrays_are_views_on_one_mapping_that_they_keep_alive(planned):
    back = through_a_file(planned)
    arrays = [array for array in arrays_of(back) if array.size]
    memory = arrays[0].base
    assert all(array.base is memory for array in arrays)
    assert all(array.flags.c_contiguous and array.flags.aligned for array in arrays)
    expected = planned.samples.values.copy()
    kept = back.samples.values
    del back, arrays, memory
    gc.collect()
    np.testing.assert_array_equal(kept, expected)


def test_writing_to_an_array_changes_nothing_for_others(planned):
    file, size = pack(planned)
    one, other = unpack(file, size), unpack(file, size)
    os.close(file)
    one.plan.worker[:] = -1
    one.samples.dense[:] = 0
    assert_same(other, planned)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only such files can be sealed")
def test_nobody_can_change_a_packed_plan(planned):
    file, size = pack(planned)
    for change in (lambda: os.pwrite(file, b"x", 0), lambda: os.ftruncate(file, size // 2)):
        with pytest.raises(PermissionError):
            change()
    os.close(file)


def test_without_memory_files_the_temporary_folder_serves(planned, monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert_same(through_a_file(planned), planned)
    assert list(tmp_path.iterdir()) == []


def test_fields_that_cannot_be_shared_are_refused_by_name(planned):
    strange = dataclasses.replace(planned, ready_at=object())
    with pytest.raises(TypeError, match="a object inside a plan cannot be shared"):
        pack(strange)
    strange = dataclasses.replace(planned, ready_at=np.array(["text"]))
    with pytest.raises(TypeError, match="an array of <U4 inside a plan"):
        pack(strange)
