"""A part of a stream is the same samples, in the same order, as the whole has there."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from click_logs import click_log
from rowhaul.data.stream import SampleStream


@pytest.mark.parametrize("shuffle_rows", [0, 150])
@pytest.mark.parametrize(("start", "end"), [(0, 64), (192, 448), (960, 1088), (1100, 1300)])
def test_a_part_is_what_the_whole_has_there(start, end, shuffle_rows, log_schema, tmp_path):
    pq.write_table(click_log(500, 0), tmp_path / "part-0.parquet", row_group_size=170)
    whole = SampleStream(tmp_path, log_schema, 64, epochs=3, shuffle_rows=shuffle_rows, seed=7)
    samples = list(whole)
    index = np.concatenate([one.index for one in samples])
    labels = np.concatenate([one.labels for one in samples])
    part = list(whole.part(start, end))
    assert np.concatenate([one.index for one in part]).tolist() == index[start:end].tolist()
    assert np.array_equal(np.concatenate([one.labels for one in part]), labels[start:end])
