"""What rank 0 sends of the data that it reads: packed in few bytes, and unpacked as it was."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from planned_cases import assert_same, samples, streams

from rowhaul.data.samples import Samples
from rowhaul.planning.planner import samples_digest
from rowhaul.planning.rank0_data.messages import (
    Description,
    Header,
    Kind,
    pack_dense,
    pack_ids,
    unpack_ids,
    with_dense,
    without_dense,
)


@given(streams())
def test_what_is_packed_is_unpacked_as_it_was(drawn):
    for one in drawn[1]:
        check_round_trip(one)


@pytest.mark.parametrize(
    "values",
    [[], [-5], [7, 7, 7], [0, 255], [0, 256], [-(2**31), 2**31 - 1], [0, 2**32], [-(2**63), 2**63 - 1]],
)
def test_ids_of_any_span(values):
    lengths = np.array([[len(values)]], np.int32)
    index = np.array([2**62])
    check_round_trip(
        Samples(("f",), np.array(values, np.int64), lengths, np.ones((1, 1), np.float32), None, index)
    )


def test_several_labels_weights_groups_and_totals_travel():
    one = samples(3, 8)
    labels = np.arange(16, dtype=np.float32).reshape(8, 2)
    labels[[1, 5], 1] = np.nan
    whole = replace(one, labels=labels, weights=np.arange(8, dtype=np.float32), groups=np.arange(8) - 2**62)
    whole = replace(whole, totals=whole.global_totals())
    check_round_trip(whole)
    description, places = Description.of(whole), np.array([2, 5])
    part = with_dense(without_dense(whole), places, pack_dense(whole, places), description)
    np.testing.assert_array_equal(part.labels[places], labels[places])
    np.testing.assert_array_equal(part.take(places).global_totals(), whole.totals)


def test_ids_take_as_few_bytes_as_their_span_needs():
    def packed(values):
        ones = np.ones((1, len(values)), np.int32)
        dense = np.zeros((len(values), 0), np.float32)
        given = Samples(("f",), np.array(values), ones, dense, None, np.arange(9, 9 + len(values)))
        return len(pack_ids(given))

    nothing = packed([5] * 1000)
    assert packed(range(10**9, 10**9 + 256)) - nothing == 256
    assert packed(range(1000)) - nothing == 2000
    assert packed(range(0, 1000 * 10**6, 10**6)) - nothing == 4000
    assert packed(range(0, 1000 * 10**9, 10**9)) - nothing == 8000


def check_round_trip(one):
    description = Description.from_bytes(Description.of(one).to_bytes())
    got, rest = unpack_ids(pack_ids(one), description)
    assert not len(rest)
    assert_same(samples_digest(got), samples_digest(without_dense(one)))
    everything = np.arange(len(one))
    packed = pack_dense(one, everything)
    assert len(packed) == description.dense_bytes(len(one))
    assert_same(with_dense(got, everything, packed, description), one)


def test_a_header_is_what_it_was():
    header = Header(Kind.WHOLE, 2**40, 8192, 7)
    assert Header.from_bytes(header.to_bytes()) == header
