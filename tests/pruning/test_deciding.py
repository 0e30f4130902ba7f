"""What decides needs numbers alone: no torch, and counts that do not depend on how accesses are added up."""

import subprocess
import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.pruning.deciding.entries import (
    MOST,
    ONE_ACCESS,
    Entries,
    count_powers,
    counts_of_sums,
    decayed_counts,
)
from rowhaul.pruning.settings import PruneSettings


def test_deciding_imports_no_torch():
    code = (
        "import sys, rowhaul.pruning.deciding.chunk_map, rowhaul.pruning.config\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1 << 18)), max_size=30),
    st.sampled_from([1.0, 0.999, 0.5]),
)
def test_counts_are_the_same_in_whatever_parts_accesses_come(steps, decay):
    whole, parts = (Entries(PruneSettings(ratio=0.5, chunks=2, decay=decay)) for _ in range(2))
    numbers = whole.add(1, 0)
    assert parts.add(1, 0) == numbers
    now = 0
    for later, accesses in steps:
        now += later
        whole.count(numbers, np.array([accesses]), now)
        for part in (accesses // 3, accesses - accesses // 3):
            parts.count(numbers, np.array([part]), now)
    for entries in (whole, parts):
        (present,), (counts,), (touched,) = entries.saved(numbers)
        assert not present.any()
        assert counts.tolist() == whole.saved(numbers)[1][0].tolist()
        assert touched == now or not steps
        expected = 0.0
        for later, accesses in steps:
            expected = min(expected * decay**later + accesses * ONE_ACCESS, MOST)
        assert abs(int(counts[0]) - expected) <= 2 * len(steps) + 1e-6 * expected


def test_counts_decay_over_thousands_of_steps():
    powers = count_powers(0.999)
    counts = decayed_counts(powers, np.full(4, MOST, np.uint32), np.array([0, 1, 1024, 5000]))
    assert counts[0] == MOST
    np.testing.assert_allclose(counts, MOST * 0.999 ** np.array([0, 1, 1024, 5000.0]), rtol=1e-5)


def test_sums_of_norms_become_counts_in_proportion():
    counts = counts_of_sums(np.array([[0.5, 1.0], [3.0, 0.0], [2.0, 2.0]], np.float32))
    assert counts[:, 0].tolist() == [ONE_ACCESS // 2, 3 * ONE_ACCESS // 2, ONE_ACCESS]
    assert not counts_of_sums(np.zeros((2, 2), np.float32)).any()
    assert counts_of_sums(np.zeros((0, 2), np.float32)).shape == (0, 1)
