"""Keys are XXH64 as the xxhash package computes it, however Arrow lays the strings out."""

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rowhaul.data.keys import hash_string, hash_strings


def xxh64(data: bytes, seed: int = 0) -> int:
    return int(np.uint64(xxhash.xxh64_intdigest(data, seed)).astype(np.int64))


@pytest.mark.parametrize("seed", [0, 1])
def test_every_length_to_200(seed):
    data = [np.random.default_rng(length).bytes(length) for length in range(201)]
    keys = hash_strings(pa.array(data, pa.binary()), seed)
    assert keys.dtype == np.int64
    assert keys.tolist() == [xxh64(one, seed) for one in data]


@given(st.lists(st.none() | st.text()))
def test_unicode_and_nulls_in_every_layout(strings):
    expected = [0 if one is None else hash_string(one) for one in strings]
    plain = pa.array(strings, pa.string())
    for array in (plain, plain.cast(pa.large_string()), plain.cast(pa.binary()), plain.dictionary_encode()):
        assert hash_strings(array).tolist() == expected
        assert hash_strings(array[1:]).tolist() == expected[1:]
    chunked = pa.chunked_array([plain, plain[2:]], pa.string())
    assert hash_strings(chunked).tolist() == expected + expected[2:]


def test_one_string_is_the_hash_of_its_utf8_bytes():
    assert hash_string("Zürich") == xxh64("Zürich".encode())
    assert hash_string("") == xxh64(b"")


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="int64"):
        hash_strings(pa.array([1, 2]))
