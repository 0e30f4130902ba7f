import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rowhaul.store.location import RANK_BITS, RECORD_BITS, pack, rank_of, record_of


@given(st.integers(0, 2**RANK_BITS - 1), st.integers(0, 2**RECORD_BITS - 1))
def test_a_location_is_a_rank_and_a_record(rank, record):
    location = pack(rank, record)
    assert 0 <= location < 2**63
    assert (rank_of(location), record_of(location)) == (rank, record)
    array = pack(np.array([rank]), np.array([record]))
    assert array.dtype == np.int64
    assert (rank_of(array).tolist(), record_of(array).tolist()) == ([rank], [record])


def test_records_of_rank_0_are_their_own_locations():
    assert pack(0, 1234567) == 1234567
